"""Images larger than a denoiser was trained for, from native-size patches, in diffusers' own loop.

ASGDiffusion (Li et al. 2024, arXiv:2412.06163), with guidance in clean latents, which is ours: docs/decisions/0015.
"""
