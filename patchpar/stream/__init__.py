"""Streams: denoising steps on different ranks, which pass blocks of frames from one to the next."""
