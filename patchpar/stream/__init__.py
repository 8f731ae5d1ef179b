"""Streams: denoising steps on different ranks, blocks of frames on their way from one to the next."""
