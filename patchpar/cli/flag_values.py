"""Values of flags that are read or checked before anything is loaded."""

import math

from patchpar.errors import PlanError

AUTO_BATCH = 8
"""Requests: whoever is in a batch waits until all of it is made."""


def batch_of(text: str) -> int:
    """Read `--batch`: the most requests in one call. Raises PlanError."""
    if text == "auto":
        return AUTO_BATCH
    if not (text.isascii() and text.isdigit()):
        raise PlanError(f"--batch {text}: use auto, or the number of requests that are made in one call")
    return int(text)


def recovers(text: str) -> bool:
    """Read `--recover`. Raises PlanError."""
    if text not in ("on", "off"):
        raise PlanError(f"--recover {text}: use on or off")
    return text == "on"


def check_deadline(seconds: float) -> None:
    """Raise PlanError unless `--deadline` is finite and above 0."""
    if not 0 < seconds < float("inf"):
        raise PlanError(f"--deadline {seconds:g}: it must be a finite number of seconds above 0")


def check_guidance(scale: float | None) -> None:
    """Raise PlanError for a `--guidance-scale` of which no image could be made."""
    if scale is not None and not math.isfinite(scale):
        raise PlanError(f"--guidance-scale {scale:g}: it must be a finite number, such as 5")


def check_seed(seed: int, *, least: int = -(2**63), most: int = 2**64 - 1) -> None:
    """Raise PlanError unless `--seed` is one that generators take, by default those of torch."""
    if not least <= seed <= most:
        raise PlanError(f"--seed {seed}: it must be from {least} to {most}")
