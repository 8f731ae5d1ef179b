"""How long passes of divided models take by their laws, whose terms are seconds that are known. Pure arithmetic.

    sharded     sum over blocks of max(c of it, g of the next one), where the next one has another slot
    exact       sum of all blocks, a hand-over at each cut, and the prediction to the first stage
    piped       max(c, N c / M + the hand-overs of one piece around all stages), for each step but the last

c: seconds that a block, or the busiest stage, computes; g: seconds in which a block is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedCase:
    """Passes of `blocks`, each of seconds and bytes, over links of `latency` seconds and `rate` bytes/s."""

    ranks: int
    blocks: tuple[tuple[float, int], ...]
    latency: float
    rate: float
    slots: int = 2
    passes: int = 4

    def gather(self, num_bytes: int) -> float:
        """Return the seconds in which a block is gathered: each rank sends its part to all others in turn."""
        return self.latency + num_bytes / self.ranks * (self.ranks - 1) / self.rate

    @property
    def law(self) -> float:
        """Seconds of all passes, the first block of the pass after them gathered too."""
        compute = [seconds for seconds, _ in self.blocks]
        gather = [self.gather(num_bytes) for _, num_bytes in self.blocks]
        return self.passes * pass_of(compute, gather, self.slots)

    @property
    def seconds_without_overlap(self) -> float:
        """The same, if no block were gathered while another one computes."""
        return self.passes * sum(seconds + self.gather(num_bytes) for seconds, num_bytes in self.blocks)


def pass_of(compute: Sequence[float], gather: Sequence[float], slots: int) -> float:
    """Return the seconds of a pass in a row of passes."""
    count, total = len(compute), 0.0
    for block in range(count):
        following = (block + 1) % count
        if following % slots == block % slots:  # its slot is in use
            total += compute[block] + gather[following]
        else:
            total += max(compute[block], gather[following])
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    """Calls of a transformer of `blocks` in exact stages. `seconds`: of a block; `hand_over`: of all tokens, likewise.

    Half of a hand-over is latency; `num_bytes` are what it sends, and `prediction_bytes` the prediction.
    """

    stages: int
    seconds: float
    hand_over: float
    num_bytes: int
    prediction_bytes: int
    blocks: int
    steps: int = 3

    @property
    def latency(self) -> float:
        """Seconds."""
        return self.hand_over / 2

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.num_bytes / (self.hand_over / 2) if self.hand_over else math.inf

    @property
    def law(self) -> float:
        """Seconds of all calls."""
        prediction = self.latency + self.prediction_bytes / self.rate
        return self.steps * (self.blocks * self.seconds + (self.stages - 1) * self.hand_over + prediction)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipedCase:
    """Steps in `pieces` after an exact one. Seconds and bytes as in `StageCase`, `hand_over` of one piece."""

    stages: int
    pieces: int
    seconds: float
    hand_over: float
    num_bytes: int
    prediction_bytes: int
    blocks: int
    steps: int = 4

    @property
    def latency(self) -> float:
        """Seconds."""
        return self.hand_over / 2

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.num_bytes / self.pieces / (self.hand_over / 2) if self.hand_over else math.inf

    @property
    def of_stage(self) -> float:
        """Seconds of a step on the busiest stage."""
        return math.ceil(self.blocks / self.stages) * self.seconds

    @property
    def around(self) -> float:
        """Seconds from the beginning of a piece in a step to that in the next one, if no other piece is in its way."""
        prediction = self.latency + self.prediction_bytes / self.pieces / self.rate
        return self.stages * self.of_stage / self.pieces + (self.stages - 1) * self.hand_over + prediction

    @property
    def step(self) -> float:
        """Seconds of a step in a row of steps."""
        return max(self.of_stage, self.around)

    @property
    def law(self) -> float:
        """Seconds of all steps, until the last piece has passed all stages."""
        return (self.steps - 1) * self.step + (self.pieces - 1) * self.of_stage / self.pieces + self.around
