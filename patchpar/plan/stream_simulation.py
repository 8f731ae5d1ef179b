"""Simulation of a stream plan without ranks: frames per second, time to first frame, jitter, idle time.

A block starts on a stage when it has arrived, the stage has finished the previous block, and there is credit for it:

    start[s][b] = max(arrived[s][b],  done[s][b-1],  (s = 0) audio of b is here and block b - credit is delivered)
    arrived[s][b] = max(done[s-1][b],  arrived[s][b-1]) + link

With constant costs this gives FPS = F / max(stage, link) and TTFF = S c + v + links (Live Avatar, arXiv:2512.04677,
table 5).
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_number, is_whole, make_plain
from patchpar.plan.stream_plan import StreamPlan, plans

MOST_SECONDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCosts:
    """Costs in seconds. `step`: one denoising step of a block. `decode`: one block. `link`: one block to the next rank.

    `frames`: images per block. `exchange`: what ranks that share a step exchange, if a whole block's were sent over one
    of their links: see StreamFolder.exchange_bytes; None if that is not known. `jitter`: one-sided spread of every
    cost, as a fraction. `source`: seconds between blocks of live audio; 0 if all audio is there at the start. Raises
    PlanError.
    """

    step: float
    decode: float
    frames: int
    link: float = 0.0
    exchange: float | None = None
    jitter: float = 0.0
    source: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self)
        costs = (self.step, self.decode, self.link, self.source, self.jitter, self.exchange or 0.0)
        if not all(is_number(cost, 0, MOST_SECONDS) for cost in costs) or self.step + self.decode == 0:
            raise PlanError(f"{self}: costs must be at least 0 and at most {MOST_SECONDS:g}, step or decode above 0")
        if not is_whole(self.frames):
            raise PlanError(f"frames={self.frames!r}: it must be a whole number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForecast:
    """Result of a simulation, in seconds. `gaps`: between blocks in the steady state, as p50, p95 and p99.

    `busy`: fraction of time that each stage works. `in_flight`: maximum of blocks in flight at once.
    """

    fps: float
    first_frame: float
    gaps: tuple[float, float, float]
    longest_gap: float
    busy: tuple[float, ...]
    in_flight: int

    def __str__(self) -> str:
        gaps = ", ".join(f"{1000 * gap:.0f}" for gap in self.gaps)
        busy = ", ".join(f"{fraction:.0%}" for fraction in self.busy)
        return (
            f"{self.fps:.1f} frames/s, first frame after {self.first_frame:.2f} s; ms between blocks (p50, p95, p99): "
            f"{gaps}; stages busy: {busy}; at most {self.in_flight} blocks in flight"
        )


def stage_seconds(plan: StreamPlan, costs: StreamCosts) -> tuple[float, ...]:
    """Return the seconds of one block on each stage. Raises PlanError for a shared step whose exchange is not known."""
    step = step_seconds(plan.inner, costs)
    return tuple(len(stage.steps) * step + (costs.decode if stage.decodes else 0.0) for stage in plan.stages)


def step_seconds(ranks: int, costs: StreamCosts) -> float:
    """Return the seconds of a step that `ranks` ranks share. Raises PlanError if their exchange is not known.

    Each computes 1/N of it, and sends (N - 1)/N of its own 1/N of the tokens, by all-to-all (DeepSpeed-Ulysses,
    arXiv:2309.14509).
    """
    if ranks == 1:
        return costs.step
    if costs.exchange is None:
        raise PlanError(f"{ranks} ranks share each step: exchange= is missing, the seconds of what they exchange")
    return costs.step / ranks + costs.exchange * (ranks - 1) / ranks**2


def law(plan: StreamPlan, costs: StreamCosts) -> tuple[float, float]:
    """Return (frames per second, seconds to the first frame) for constant costs, in closed form."""
    seconds = stage_seconds(plan, costs)
    return costs.frames / max(*seconds, costs.link, costs.source), sum(seconds) + costs.link * (plan.depth - 1)


def simulate(
    plan: StreamPlan,
    costs: StreamCosts,
    *,
    blocks: int = 400,
    lead: int = 1,
    seed: int = 0,
) -> StreamForecast:
    """Simulate `blocks` blocks, with credit for `lead` blocks more than there are stages. Raises PlanError."""
    least = max(4 * plan.depth, plan.depth + lead + 2)
    if blocks < least:
        raise PlanError(f"blocks={blocks}: the rate of {plan.depth} stages, lead={lead}, needs at least {least} blocks")
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
    """Return the plan for at most `ranks` ranks with the earliest first frame among those that reach `fps`.

    If none reaches it, the one with the most frames per second. Ties: more frames per second, then fewer ranks. Plans
    that share a step are left out where what they exchange is not known.
    """
    known = []
    for plan in plans(steps, ranks):
        if plan.inner > 1 and costs.exchange is None:
            continue
        rate, first_frame = law(plan, costs)
        known.append((round(first_frame, 9), -round(rate, 9), plan.ranks, plan.sizes, plan))
    wanted = min(fps, max(-entry[1] for entry in known))
    return min((entry for entry in known if -entry[1] >= wanted), key=lambda entry: entry[:4])[-1]
