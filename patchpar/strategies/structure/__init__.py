"""Images larger than a denoiser was trained for, from native-size patches, in diffusers' own loop."""
