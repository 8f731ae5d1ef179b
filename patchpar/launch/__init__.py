"""How ranks come to be, and how one call reaches all of them. Knows nothing of diffusion: it runs an engine."""
