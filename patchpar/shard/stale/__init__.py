"""Stale values (of the previous step): stored, sent, corrected, extrapolated."""
