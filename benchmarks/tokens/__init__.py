"""Transformers by tokens: time, and what is sent."""
