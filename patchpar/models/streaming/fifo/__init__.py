"""Networks with a noise level per frame, and FIFO-Diffusion's queue of frames (arXiv:2405.11473)."""
