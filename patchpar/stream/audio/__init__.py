"""Audio that a stream is conditioned on, and audio files."""
