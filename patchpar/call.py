"""What travels between a caller and the ranks for one pipeline call. No torch, so that a caller need not import it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """What a call needs beside the pipeline's own arguments.

    `random_state`: the caller's CPU random state, or a seed, for calls without a generator. `has_callback`: the caller
    has a callback_on_step_end. `same_everywhere`: take rank 0's random state, since under torchrun each process has its
    own. `quiet`: no progress bar on the ranks, the caller shows one.
    """

    random_state: Any = None
    has_callback: bool = False
    same_everywhere: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What one rank reports of one call: its output where it is the one to give it, and figures.

    `generators` and `random_state` are the states after the call of the generators that were passed, and of torch:
    the caller's must move on as if the call had been made there.
    """

    output: Any
    steps: int
    seconds: float
    bytes_sent: int
    traffic: Mapping[str, int]
    waited: Mapping[str, float]
    generators: tuple[Any, ...]
    random_state: Any


def generators_of(kwargs: Mapping[str, Any]) -> list[Any]:
    """Every torch.Generator among the arguments, in order, also those in lists."""
    found = []
    for value in kwargs.values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if type(item).__module__.startswith("torch") and type(item).__name__ == "Generator":
                found.append(item)
    return found
