"""How a denoiser call is shared between ranks: one method per file."""
