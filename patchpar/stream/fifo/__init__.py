"""FIFO-Diffusion (arXiv:2405.11473): a queue of frames at rising noise levels."""
