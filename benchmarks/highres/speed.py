"""How long a large image takes on so many ranks, from what an evaluation, a decode and a PNG take on one core.

    steps above the switch   the longest rank's evaluations of patches, alone and in its team
    steps below it           the longest rank's evaluations of windows and of what leads them, alone and in its team
    then                     the decode, shared by rows, and the PNG, by bands

Predicted, not run: exchange is left out (its bytes are in docs/structure-guidance.md), and a core a rank is assumed.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields
from statistics import median
from typing import Any

import torch
from PIL import Image

from benchmarks.highres.stand_in import StandIn
from patchpar import StructureGuidance
from patchpar.comm.collectives import Communicator
from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.plan.mesh import Axis
from patchpar.shard.unet.denoiser import PatchedDenoiser
from patchpar.strategies.structure.sizing import units_of
from patchpar.strategies.structure.work_schedule import evaluations_of, scheduled

STEPS, TURNS = 50, 3
RANKS, BANDS = (1, 2, 4, 8), (2, 4)
DECODED = 1.99 / 2  # of the ideal, measured with two ranks: docs/figures/vae.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of one evaluation of both guidance branches and of one, of a decode, and of a PNG.

    `in_bands`: of an evaluation by a team, by its ranks and the branches.
    """

    both: float
    one: float
    decode: float
    png: float
    in_bands: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def of(self, branches: int, bands: int) -> float:
        """An evaluation of so many branches."""
        return self.in_bands[bands, branches] if bands > 1 else {1: self.one, 2: self.both}[branches]


def measured(model: StandIn, scale: int) -> Seconds:
    """On this machine, one thread for each rank: medians."""
    pixels = scale * model.side * model.cell
    image = Image.fromarray(torch.randint(0, 8, (pixels, pixels, 3), dtype=torch.uint8).numpy())
    with torch.no_grad():
        return Seconds(
            both=_median(lambda: model.unet(**model.call(2))),
            one=_median(lambda: model.unet(**model.call(1))),
            decode=_taken(model.decode(scale)),  # too long for what a first turn costs to matter
            png=_median(
                lambda: image.save(io.BytesIO(), "PNG", compress_level=1), time.process_time
            ),  # a thread of its own
            in_bands={(bands, branches): _in_bands(model, bands, branches) for bands in BANDS for branches in (1, 2)},
        )


def _median(call: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    """Of this thread's processor, which is what it takes on a core of its own; the first turn warms up."""
    return median([_taken(call, clock) for _ in range(TURNS + 1)][1:])


def _taken(call: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    start = clock()
    call()
    return clock() - start


def _in_bands(model: StandIn, bands: int, branches: int) -> float:
    """Of the rank of a team that takes longest; ranks are threads, and waiting is not counted."""
    from tests.unit.threads import on_threads

    taken = on_threads(bands, _as_a_rank, model, [model.unet_again() for _ in range(bands)], branches, deadline=600.0)
    for each in taken:
        if isinstance(each, Exception):
            raise each
    return max(taken)


def _as_a_rank(transport: Any, model: StandIn, unets: list[Any], branches: int) -> float:
    torch.set_num_threads(1)  # of this thread
    unet, call = unets[transport.rank], model.call(branches)
    axis = Axis("patch", transport.rank, len(unets), tuple(range(len(unets))))
    team = PatchedDenoiser(unet, (Communicator(transport), axis), ExchangePolicy(name="exact"))
    with torch.no_grad():
        return _median(lambda: team.denoise(unet.forward, **call))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of an image of 50 steps, both branches of guidance, by what takes them."""

    above: float
    below: float
    decode: float
    png: float

    @property
    def all(self) -> float:
        """Together."""
        return sum(astuple(self))


def predicted(strategy: StructureGuidance, seconds: Seconds, scale: int, ranks: int) -> Spent:
    """An image at `scale` times the native side on so many ranks. Teams are at most half of them."""
    method, native = strategy.method, 64
    tiling = {"overlap": strategy.overlap, "margin": strategy.margin}
    patches, windows = units_of((scale * native,) * 2, (native,) * 2, 1, **tiling)
    masked = method.guidance.masked
    follows = method.guidance.strength(0) == 1 and method.guidance.decay == "none" and not masked
    before, bands = round(STEPS * (1 - method.switch)), max(1, min(method.bands, ranks // 2))
    larger = (1 + (strategy.margin or 0)) ** 2  # evaluations grow with the area of a window
    return Spent(
        above=before * _step(1 if follows else patches, seconds, ranks, 1 if masked else bands),
        below=(STEPS - before) * larger * _step(windows + (method.structure_strength > 0), seconds, ranks, bands),
        decode=seconds.decode / (1 if ranks == 1 else ranks * DECODED),
        png=seconds.png / ranks,
    )


def _step(patches: int, seconds: Seconds, ranks: int, bands: int) -> float:
    """The longest rank's evaluations, alone and in its team."""
    schedule = scheduled(patches, 2, ranks, bands)
    return max(
        sum(seconds.of(len(call.branches), 1) for call in evaluations_of(alone, 2))
        + sum(seconds.of(len(call.branches), bands) for call in evaluations_of(together, 2))
        for alone, together in zip(schedule.whole_units, schedule.split_units, strict=True)
    )


def table(strategies: dict[str, StructureGuidance], model: StandIn, scale: int) -> Iterator[str]:
    """Seconds on one rank, how many times as fast on more, and where most ranks gain less than there are of them."""
    seconds = measured(model, scale)
    evaluations = f"An evaluation of both branches takes {seconds.both:.3f} s, of one {seconds.one:.3f} s"
    teams = " and ".join(f"{seconds.of(1, bands):.3f} s by {bands} ranks" for bands in BANDS)
    yield f"{evaluations}, {teams}; the decode {seconds.decode:.1f} s, the PNG {seconds.png:.2f} s."
    yield ""
    parts = ", ".join(field.name for field in fields(Spent))
    several = " | ".join(f"{ranks} ranks" for ranks in RANKS[1:])
    yield f"| {scale} x {scale} | 1 rank | {several} | {RANKS[-1]} ranks: {parts} |"
    yield "|---|---|" + "---|" * len(RANKS)
    for name, strategy in strategies.items():
        taken = [predicted(strategy, seconds, scale, ranks) for ranks in RANKS]
        faster = " | ".join(f"{taken[0].all / each.all:.2f}x" for each in taken[1:])
        gains = ", ".join(f"{a / b:.1f}x" for a, b in zip(astuple(taken[0]), astuple(taken[-1]), strict=True))
        yield f"| {name} | {taken[0].all:.0f} s | {faster} | {gains} |"
