"""Streaming of block-causal video models.

CausVid (Yin et al. 2024, arXiv:2412.07772) and Self-Forcing (Huang et al. 2025, arXiv:2506.08009): attention to the
blocks before. A denoising step on each rank and the rolling sink are Live Avatar's (arXiv:2512.04677).
"""
