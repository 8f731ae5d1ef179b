"""Tensor parallelism: each rank of axis `tensor` holds some features of a block's Linears, found by perturbing them."""
