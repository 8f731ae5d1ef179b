"""Runs of a pipeline without weights and without computing: its memory and work at any size, before loading."""
