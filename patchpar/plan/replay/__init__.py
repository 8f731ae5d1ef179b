"""Replay of programs of ranks on a machine that is described, not there: seconds of each rank. Pure Python."""
