"""Text and image encoders on one rank of an image: what they return travels to the others."""
