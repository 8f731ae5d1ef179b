"""Tensor parallelism: each rank of axis `tensor` holds some features of a block's Linears, found by perturbing them.

Columns, rows and sums are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053); the search is ours:
docs/tensor-parallelism.md.
"""
