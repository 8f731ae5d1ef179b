"""What one rank reports of one call: bytes, waiting, exact steps, memory; of the whole and step by step.

Pure Python: a caller that only reads figures need not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patchpar.comm.trace import RankTrace

VAE = "vae"  # the kind of all that encoding and decoding exchange
Bytes = Mapping[str, int]  # by kind of exchange
Seconds = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step: from the end of the one before it to the return of scheduler.step, by kind of exchange.

    `exact_calls` and `stale_calls` count denoiser calls that used this step's values only, and those that used some of
    the last step's. Both are 0 under a strategy that never uses old values, and where another guidance rank calls.
    """

    bytes_sent: Bytes
    bytes_received: Bytes
    seconds_waited: Seconds
    exact_calls: int = 0
    stale_calls: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "bytes_sent": dict(self.bytes_sent),
            "bytes_received": dict(self.bytes_received),
            "seconds_waited": _rounded(self.seconds_waited),
            "exact_calls": self.exact_calls,
            "stale_calls": self.stale_calls,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """One rank in a whole call. What follows the last step, such as messages that come too late, is in the sums only.

    So is the kind "vae": what encoding and decoding exchange belongs to no step.

    `stale_bytes`: what its seams held of the last step when the last one ended. `trace` where it was asked for.
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
        """Denoiser calls with this step's values only, under a strategy that may use old ones."""
        return sum(step.exact_calls for step in self.steps)

    @property
    def stale_calls(self) -> int:
        """Denoiser calls with values of the last step."""
        return sum(step.stale_calls for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; without the trace, which is a file of its own."""
        return {
            "rank": self.rank,
            "device": self.device,
            "bytes_sent": dict(self.bytes_sent),
            "bytes_received": dict(self.bytes_received),
            "seconds_waited": _rounded(self.seconds_waited),
            "stale_bytes": self.stale_bytes,
            "exact_calls": self.exact_calls,
            "stale_calls": self.stale_calls,
            "steps": [step.as_dict() for step in self.steps],
        }


def _rounded(seconds: Seconds) -> dict[str, float]:
    return {kind: round(value, 6) for kind, value in seconds.items()}
