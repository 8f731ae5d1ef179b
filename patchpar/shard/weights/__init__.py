"""Weights of a network in byte shards over ranks, gathered block by block when a block runs.

As ZeRO-3 shards weights (Rajbhandari et al. 2020, arXiv:1910.02054), and Superpipeline brings layers from the host
(arXiv:2410.08791): docs/weights.md.
"""
