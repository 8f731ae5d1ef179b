"""What a denoiser loses where its parts do not see each other."""
