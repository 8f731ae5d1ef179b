"""Decode and encode images and videos on several ranks, exactly: each rank has a band of the rows."""
