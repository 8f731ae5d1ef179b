"""What a plan costs on a machine: programs of ranks recorded without weights, priced, and replayed.

Traces of programs that are replayed on described machines, as in ASTRA-sim (arXiv:2303.14006) and vTrain
(arXiv:2312.12391); recording them from the code itself, without weights, is ours: docs/simulator.md.
"""
