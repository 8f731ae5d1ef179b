"""The latency from live audio to its image: what each part of a stream adds, by its plan and costs."""

from __future__ import annotations

from dataclasses import dataclass

from patchpar.errors import PlanError
from patchpar.plan.stream_plan import StreamPlan
from patchpar.plan.stream_simulation import StreamCosts, stage_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OnsetBudget:
    """Seconds from live audio to its image. `buffer`: delay of the clock so that the slowest block is in time."""

    fill: float
    steps: float
    decode: float
    link: float
    buffer: float

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return self.fill + self.steps + self.decode + self.link + self.buffer

    def __str__(self) -> str:
        return (
            f"{self.seconds:.2f} s from audio to image: {self.fill:.2f} until a block is full, {self.steps:.2f} to "
            f"denoise it, {self.decode:.2f} to decode it, {self.link:.2f} to send it, {self.buffer:.2f} for jitter"
        )


def onset(plan: StreamPlan, costs: StreamCosts, *, spread: float = 0.0) -> OnsetBudget:
    """Return the latency from audio to its image, with `costs.source` seconds of audio per block. Raises PlanError.

    `spread`: how much longer than the usual block the slowest takes, as a fraction.

    It is the same for all audio of a block: the first samples wait until the block is full, and the last until their
    image is due. No block waits in a queue as long as no stage takes longer than `costs.source`.
    """
    if costs.source <= 0:
        raise PlanError("source=0: give the seconds of live audio per block")
    slowest = max(*stage_seconds(plan, costs), costs.link)
    if slowest > costs.source:
        raise PlanError(
            f"the slowest stage takes {slowest:.2f} s for a block of {costs.source:.2f} s of audio, so that the delay "
            "would grow without limit: use more ranks, fewer steps, or larger blocks"
        )
    *denoise, last = stage_seconds(plan, costs)
    steps = sum(denoise) + last - costs.decode
    return OnsetBudget(
        fill=costs.source,
        steps=steps,
        decode=costs.decode,
        link=costs.link * (plan.depth - 1),
        buffer=spread * (steps + costs.decode),
    )
