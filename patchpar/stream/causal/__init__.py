"""Block-causal video models as streams."""
