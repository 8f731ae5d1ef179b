"""Stages: runs of a network's blocks on different ranks, of which each holds the weights of its own blocks only.

Stages as in GPipe (Huang et al. 2019, arXiv:1811.06965). How a network is cut, and that only blocks are, is ours:
docs/stages.md.
"""
