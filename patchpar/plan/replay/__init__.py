"""Replay of programs of ranks on a machine that is described, not there: seconds of each rank. Pure Python.

As ASTRA-sim (Won et al. 2023, arXiv:2303.14006) replays traces; rates and their sources are in `device_catalogue`.
"""
