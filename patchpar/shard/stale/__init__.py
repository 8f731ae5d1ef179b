"""Stale values (of the previous step): stored, sent, corrected, extrapolated.

Displaced patches are DistriFusion's (arXiv:2402.19481). What is sent, and how stale tokens are extrapolated and
corrected, is ours: docs/decisions/0012 and 0017.
"""
