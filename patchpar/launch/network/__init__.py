"""Ranks on several nodes that one caller controls: they meet over TCP, know one another by a key, and tag messages."""
