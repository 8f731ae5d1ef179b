"""Tests and measurements for the day a GPU is at hand: unattended, resumable, and partial when time runs out."""
