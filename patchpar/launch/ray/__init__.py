"""Ranks as actors of a Ray cluster. Ray is imported where it is used, since it is an extra."""
