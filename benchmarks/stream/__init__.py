"""Streams: stages, half an hour, from a sound to its image, images."""
