"""Pictures larger than a denoiser was trained for, out of native-size patches, in diffusers' own loop."""
