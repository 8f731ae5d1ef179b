"""Streams: stages, half an hour, from an audio signal to its image, images."""
