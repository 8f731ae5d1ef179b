"""Triton programs. Only launchers in `shard.kernels` import them, so that Triton is loaded at the first launch.

Why they are written by hand: docs/decisions/0025. Moments are merged as in Chan, Golub and LeVeque (1979), parts of
attention by their log-sum-exp (Milakov & Gimelshein 2018, arXiv:1805.02867).
"""
