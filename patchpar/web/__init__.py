"""A web server, and live media in a browser: MJPEG, fragmented MP4 with audio, WebRTC."""
