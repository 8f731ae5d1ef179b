"""Streams on their way to browsers while they are made: JPEG after JPEG, or a film in fragments with its sound."""
