"""Branches of classifier-free guidance on the ranks of axis `cfg`."""
