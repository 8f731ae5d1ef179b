"""Stages: runs of a network's blocks on different ranks, of which each holds the weights of its own blocks only."""
