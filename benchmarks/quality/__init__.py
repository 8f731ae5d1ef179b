"""Quality of images against bytes sent."""
