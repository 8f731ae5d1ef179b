"""Branches of classifier-free guidance on the ranks of axis `cfg`.

Classifier-free guidance is that of Ho & Salimans (2022, arXiv:2207.12598); DistriFusion (arXiv:2402.19481) and xDiT
(arXiv:2411.01738) split its branches too.
"""
