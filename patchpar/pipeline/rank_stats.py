"""Statistics of one rank in one call: bytes, waiting time, exact steps, memory; in total and for each step.

Does not import torch, so that a caller which only reads statistics need not.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from patchpar.comm.trace import RankTrace

VAE = "vae"  # the kind of all exchanges of encoding and decoding
Bytes = Mapping[str, int]  # by kind of exchange
Seconds = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step, from the end of the previous one to the return of scheduler.step, by kind of exchange.

    `exact_calls` and `stale_calls` count denoiser calls with fresh values only, and calls with some stale values. Both
    are 0 with a strategy that never uses stale values, and where another guidance rank makes the call.
    `replayed_calls` of all calls were replays of graphs, whose waits for other ranks are not in `seconds_waited`.
    """

    bytes_sent: Bytes
    bytes_received: Bytes
    seconds_waited: Seconds
    exact_calls: int = 0
    stale_calls: int = 0
    replayed_calls: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return _as_dict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """One rank in a whole call. Exchanges after the last step, such as late messages, are in the totals only.

    So is the kind "vae", since encoding and decoding belong to no step.

    `stale_bytes`: bytes of stale values that the rank held at the end of the last step. `trace` if it was requested.
    """

    rank: int
    device: str
    bytes_sent: Bytes
    bytes_received: Bytes
    seconds_waited: Seconds
    stale_bytes: int = 0
    steps: tuple[StepStats, ...] = ()
    trace: RankTrace | None = None

    @property
    def exact_calls(self) -> int:
        """Denoiser calls with fresh values only, with a strategy that may use stale ones."""
        return sum(step.exact_calls for step in self.steps)

    @property
    def stale_calls(self) -> int:
        """Denoiser calls with stale values."""
        return sum(step.stale_calls for step in self.steps)

    @property
    def replayed_calls(self) -> int:
        """Denoiser calls that were replays of graphs."""
        return sum(step.replayed_calls for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics for JSON, without the trace, which has its own file."""
        steps = [step.as_dict() for step in self.steps]
        names = ("exact_calls", "stale_calls", "replayed_calls")
        calls = {name: getattr(self, name) for name in names} | {"steps": steps}
        return {**_as_dict(replace(self, trace=None, steps=())), **calls}


def _as_dict(stats: StepStats | RankStats) -> dict[str, Any]:
    """Return all fields that are set, seconds rounded to microseconds."""
    found = {name: value for name, value in asdict(stats).items() if value is not None}
    return found | {"seconds_waited": {kind: round(seconds, 6) for kind, seconds in stats.seconds_waited.items()}}
