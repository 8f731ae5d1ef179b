"""Streams on their way to browsers while they are made: JPEG after JPEG, or a video in fragments with its audio."""
