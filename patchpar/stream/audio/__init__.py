"""Audio conditioning of a stream, and audio files."""
