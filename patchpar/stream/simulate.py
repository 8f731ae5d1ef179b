"""What a stream plan will do, before any rank is started: frames per second, first frame, jitter, idle time.

A block starts on a stage when it has arrived, the stage is done with the block before, and there is credit for it:

    start[s][b] = max(arrived[s][b],  done[s][b-1],  (s = 0) audio of b is here and block b - credit has come out)
    arrived[s][b] = max(done[s-1][b],  arrived[s][b-1]) + link

For steady stages this gives the law FPS = F / max(stage, link) and TTFF = S c + v + links (Live Avatar,
arXiv:2512.04677, table 5).
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from patchpar.errors import PlanError
from patchpar.stream.plan import StreamPlan, plans


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCosts:
    """Seconds. `step`: one denoising step of one block. `decode`: one block. `link`: one block to the next rank.

    `frames`: images per block. `inner_speedup`: how much faster a step is for each doubling of its ranks. `jitter`:
    spread of every cost, as a share, one-sided. `source`: seconds between blocks of audio that arrive live; 0 where all
    of it is there.
    """

    step: float
    decode: float
    frames: int
    link: float = 0.0
    inner_speedup: float = 1.6
    jitter: float = 0.0
    source: float = 0.0

    def __post_init__(self) -> None:
        if min(self.step, self.decode, self.link, self.source, self.jitter) < 0 or self.step + self.decode == 0:
            raise PlanError(f"{self}: costs are at least 0, and there is work to be done")
        if self.frames < 1:
            raise PlanError(f"frames={self.frames}: a block has at least 1 frame")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForecast:
    """What to expect. Seconds; `gaps` are those between blocks in the steady state: median, 95th and 99th percentile.

    `busy`: share of its time that each stage works. `in_flight`: most blocks under way at once.
    """

    fps: float
    first_frame: float
    gaps: tuple[float, float, float]
    longest_gap: float
    busy: tuple[float, ...]
    in_flight: int

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Share of its time that each stage stands idle."""
        return tuple(1 - fraction for fraction in self.busy)

    def __str__(self) -> str:
        gaps = ", ".join(f"{1000 * gap:.0f}" for gap in self.gaps)
        busy = ", ".join(f"{fraction:.0%}" for fraction in self.busy)
        return (
            f"{self.fps:.1f} frames/s, first frame after {self.first_frame:.2f} s; ms between blocks (p50, p95, p99): "
            f"{gaps}; stages busy: {busy}; at most {self.in_flight} blocks in flight"
        )


def stage_seconds(plan: StreamPlan, costs: StreamCosts) -> tuple[float, ...]:
    """What one block costs on each stage."""
    fraction = costs.inner_speedup ** math.log2(plan.inner)
    return tuple(
        len(stage.steps) * costs.step / fraction + (costs.decode if stage.decodes else 0.0) for stage in plan.stages
    )


def law(plan: StreamPlan, costs: StreamCosts) -> tuple[float, float]:
    """(frames per second, seconds to the first frame) of steady stages, in closed form."""
    seconds = stage_seconds(plan, costs)
    return costs.frames / max(*seconds, costs.link, costs.source), sum(seconds) + costs.link * (plan.depth - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnsetBudget:
    """Seconds from audio to its image, in a live stream that is shown by the clock.

    `buffer`: by how much the clock is behind the usual block, so that the slowest is shown in time as well.
    """

    fill: float
    steps: float
    decode: float
    link: float
    buffer: float

    @property
    def seconds(self) -> float:
        """All together."""
        return self.fill + self.steps + self.decode + self.link + self.buffer

    def __str__(self) -> str:
        return (
            f"{self.seconds:.2f} s from audio to image: {self.fill:.2f} until a block is full, {self.steps:.2f} to "
            f"denoise it, {self.decode:.2f} to decode it, {self.link:.2f} on the way, {self.buffer:.2f} for the slowest"
        )


def onset(plan: StreamPlan, costs: StreamCosts, *, spread: float = 0.0) -> OnsetBudget:
    """What is between audio and its image where `costs.source` seconds of audio make a block. Raises PlanError.

    `spread`: how much longer than the usual block the slowest takes, as a share.

    The same for all audio of a block: what comes first waits until the block is full, and what comes last until it is
    due. Nothing waits in a queue, as long as every stage keeps pace.
    """
    if costs.source <= 0:
        raise PlanError("source=0: say how many seconds of live audio make a block")
    slowest = max(*stage_seconds(plan, costs), costs.link)
    if slowest > costs.source:
        raise PlanError(
            f"the slowest stage takes {slowest:.2f} s for a block, but {costs.source:.2f} s of audio make one, so that "
            "images would come later and later: use more ranks, fewer steps, or larger blocks"
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


def simulate(
    plan: StreamPlan,
    costs: StreamCosts,
    *,
    blocks: int = 400,
    lead: int = 1,
    seed: int = 0,
    drain_at: int | None = None,
) -> StreamForecast:
    """Run `blocks` blocks through the plan, with credit for `lead` blocks more than there are stages.

    `drain_at`: a block that starts only when the one before has come out, as a collective in mid-stream would have it.
    """
    if blocks < 4 * plan.depth:
        raise PlanError(
            f"blocks={blocks}: a pipeline of {plan.depth} stages shows its rate in {4 * plan.depth} or more"
        )
    chance = random.Random(seed)
    seconds = stage_seconds(plan, costs)
    credit = plan.depth + lead
    starts = [[0.0] * blocks for _ in seconds]
    ends = [[0.0] * blocks for _ in seconds]
    arrived = [0.0] * len(seconds)
    for block in range(blocks):
        for stage, cost in enumerate(seconds):
            ready = (block + 1) * costs.source
            if stage:
                ready = arrived[stage] = max(ends[stage - 1][block], arrived[stage]) + costs.link
            if block:
                ready = max(ready, ends[stage][block - 1])
            if stage == 0 and block >= credit:
                ready = max(ready, ends[-1][block - credit] + costs.link)
            if stage == 0 and block == drain_at:
                ready = max(ready, ends[-1][block - 1])
            starts[stage][block] = ready
            ends[stage][block] = ready + cost * (1 + costs.jitter * abs(chance.gauss(0, 1)))
    return _forecast(starts, ends, costs, warm=plan.depth + lead)


def _forecast(
    starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]], costs: StreamCosts, *, warm: int
) -> StreamForecast:
    out = ends[-1]
    every = [b - a for a, b in pairwise(out)]
    gaps = sorted(every[warm:])
    span = out[-1] - out[warm]
    busy = [
        sum(end - start for start, end in zip(begun[warm + 1 :], done[warm + 1 :], strict=True)) / span
        for begun, done in zip(starts, ends, strict=True)
    ]
    under_way = max(block + 1 - bisect_right(out, begun) for block, begun in enumerate(starts[0]))
    return StreamForecast(
        fps=costs.frames * len(gaps) / span,
        first_frame=out[0] - costs.source,
        gaps=tuple(gaps[min(len(gaps) - 1, int(fraction * len(gaps)))] for fraction in (0.5, 0.95, 0.99)),  # type: ignore[arg-type]
        longest_gap=max(every),
        busy=tuple(min(1.0, fraction) for fraction in busy),
        in_flight=under_way,
    )


def best_plan(steps: int, ranks: int, costs: StreamCosts, *, fps: float = 0.0) -> StreamPlan:
    """The plan for at most `ranks` ranks that shows its first frame soonest, of those that reach `fps`.

    Where none reaches it, the fastest. Of equals the fastest, and of those the one with fewest ranks.
    """
    known = []
    for plan in plans(steps, ranks):
        rate, first_frame = law(plan, costs)
        known.append((round(first_frame, 9), -round(rate, 9), plan.ranks, plan.sizes, plan))
    wanted = min(fps, max(-entry[1] for entry in known))
    return min((entry for entry in known if -entry[1] >= wanted), key=lambda entry: entry[:4])[-1]
