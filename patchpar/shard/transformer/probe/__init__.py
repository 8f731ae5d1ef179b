"""Find where the tokens of a transformer are, by running it with perturbed inputs.

Ours: docs/decisions/0013 has the reasons.
"""
