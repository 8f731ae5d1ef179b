"""Prompts of one call on the ranks of axis `data`."""
