"""The modes of a VAE on several ranks, by name. Does not import torch."""

from patchpar.errors import PlanError

MODES = {
    "auto": "exact where the VAE can be split, else rank0 with a warning",
    "exact": "every rank has a band of the rows; the result is that of one process",
    "tiled": "one rank, in overlapping tiles as diffusers has them: less memory, another result",
    "rank0": "one rank, as it is",
}


def check_mode(vae: object) -> str:
    """Raise PlanError unless `vae` is one of `MODES`."""
    if not isinstance(vae, str) or vae not in MODES:
        raise PlanError(f"vae={vae!r}: use {', '.join(MODES)}")
    return vae
