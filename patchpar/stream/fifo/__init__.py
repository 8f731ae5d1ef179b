"""FIFO-Diffusion (arXiv:2405.11473): a queue of latent frames at rising noise levels."""
