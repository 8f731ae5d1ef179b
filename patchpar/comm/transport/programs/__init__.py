"""Triton programs of the transport."""
