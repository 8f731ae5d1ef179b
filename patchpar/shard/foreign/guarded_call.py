"""A call of a network with foreign code that ranks compute together, and what it is compared with."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from patchpar.shard.foreign.cuts import Cut

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedCall:
    """A call of a form that ranks compute together: as `split`, and `plain` for a comparison.

    `cuts`: how its tensors were divided; `exactly`: the split call to compare if `split` uses values of earlier steps;
    `shaken`: the plain call with a latent that is rounded otherwise, by a seed;
    `divides`: whether ranks have computed parts of the call, rather than some of several calls; `computes`: what each
    call is for, if calls of one step are for different things, between which nothing may be kept; `what` differs if it
    differs, `mixed` is what foreign code then mixes, and `way_out` is what to do, for messages. `smaller`: such calls
    with fewer tokens, the largest first, to compare where `plain` does not fit in memory: their `split` uses no values
    of earlier steps.
    """

    form: Any
    split: Run
    plain: Run
    cuts: Callable[[], Sequence[Cut]]
    exactly: Run | None = None
    shaken: Callable[[int], Any] | None = None
    smaller: Callable[[], Iterable["GuardedCall"]] = tuple
    divides: Callable[[], bool] = lambda: True
    computes: str = ""
    what: str
    mixed: str
    way_out: str
