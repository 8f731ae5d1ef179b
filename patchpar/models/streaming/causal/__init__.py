"""Block-causal transformers: CausVid (arXiv:2412.07772), Self-Forcing (arXiv:2506.08009) and their successors."""
