"""Live streams for browsers: MJPEG, or fragmented MP4 with audio."""
