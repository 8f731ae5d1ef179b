"""Weights of a network in byte shards over ranks, gathered block by block when a block runs."""
