"""Image pipelines as streams: one image after the other."""
