"""Image pipelines as streams of images."""
