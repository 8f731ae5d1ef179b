"""Convolutional denoisers in bands of rows: layer arithmetic, exchange hooks, discovery of layers that need them.

Bands and halos are DistriFusion's (arXiv:2402.19481), made exact: docs/exact-patch.md, docs/decisions/0009. Moments are
merged as in Chan, Golub and LeVeque (1979).
"""
