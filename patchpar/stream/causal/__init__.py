"""Streaming of block-causal video models."""
