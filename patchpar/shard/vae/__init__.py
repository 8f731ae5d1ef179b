"""Decode and encode images and videos on several ranks, exactly: each rank has a band of the rows.

Ours: docs/decisions/0014 has the reasons.
"""
