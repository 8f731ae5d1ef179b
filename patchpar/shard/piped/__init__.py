"""A transformer whose tokens are computed in pieces, one after the other, by stages that work at the same time.

PipeFusion (Fang et al. 2024, arXiv:2405.14430).
"""
