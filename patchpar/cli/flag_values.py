"""Values of flags that are read or checked before anything is loaded."""

import math

from patchpar.errors import PlanError
from patchpar.plan.scalars import whole_in

AUTO_BATCH = 8
"""Requests: whoever is in a batch waits until all of it is made."""


def batch_of(text: str) -> int:
    """Read `--batch`: the most requests in one call. Raises PlanError."""
    if text == "auto":
        return AUTO_BATCH
    number = whole_in(text)
    if number is None:
        raise PlanError(f"--batch {text:.80}: use auto, or the number of requests that are made in one call")
    return number


def recovers(text: str) -> bool:
    """Read `--recover`. Raises PlanError."""
    if text not in ("on", "off"):
        raise PlanError(f"--recover {text}: use on or off")
    return text == "on"


def refuse_torchrun(verb: str) -> None:
    """Raise PlanError under torchrun for a verb that starts workers of its own: each process would start them."""
    from patchpar.launch.torchrun_variables import torchrun_world

    if torchrun_world() is not None:
        raise PlanError(f"{verb} starts its own workers: start it without torchrun")


def check_positive(flags: object, *names: str) -> None:
    """Raise PlanError for one of these counts and sizes, or lists of them, that is given and below 1."""
    for name in names:
        value = getattr(flags, name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and each < 1:
                raise PlanError(f"--{name.replace('_', '-')} {each}: it must be at least 1")


def check_deadline(seconds: float) -> None:
    """Raise PlanError unless `--deadline` is finite and above 0."""
    if not 0 < seconds < float("inf"):
        raise PlanError(f"--deadline {seconds:g}: it must be a finite number of seconds above 0")


def check_guidance(scale: float | None) -> None:
    """Raise PlanError for a `--guidance-scale` of which no image could be made."""
    if scale is not None and not math.isfinite(scale):
        raise PlanError(f"--guidance-scale {scale:g}: it must be a finite number, such as 5")


def check_length(seconds: float | None) -> None:
    """Raise PlanError unless `--seconds`, None for a stream without an end, is finite and above 0."""
    if seconds is not None and not seconds > 0:
        raise PlanError(f"--seconds {seconds}: it must be above 0")
    if seconds == math.inf:
        raise PlanError(f"--seconds {seconds}: it must be a finite number; for no end leave it out")


def check_strength(strength: float | None) -> None:
    """Raise PlanError unless `--strength`, which is a part of the noise, is above 0 and at most 1."""
    if strength is not None and not 0 < strength <= 1:
        raise PlanError(f"--strength {strength:g}: it must be above 0 and at most 1")


def check_seed(seed: int, *, least: int = -(2**63), most: int = 2**64 - 1) -> None:
    """Raise PlanError unless `--seed` is one that generators take, by default those of torch."""
    if not least <= seed <= most:
        raise PlanError(f"--seed {seed}: it must be from {least} to {most}")
