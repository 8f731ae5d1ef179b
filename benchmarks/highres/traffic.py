"""What a rank sends in a step of a large image, from the geometry alone, in units of the latent.

    above the switch   patches by bands of rows to who completes them, bands to all
    below it           what windows cover of others' bands; of bands and of the guide to each rank what it needs
    last step          the same, but that no window follows, and then bands of the latents to all

After guidance, so of one branch; the first step sends every branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from patchpar import StructureGuidance
from patchpar.strategies.structure.blending import BlendPlan
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.needed_regions import NeededRegions, WindowPlan
from patchpar.strategies.structure.windows import Tiling, Windows
from patchpar.strategies.structure.work_schedule import assign_units, merged, scheduled

STEPS, NATIVE = 50, 64
RANKS = (2, 3, 4, 8)
CHANNELS, RATE, LATENCY = 4, 125e6, 1e-3  # of a latent; bytes per second; seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """By one rank in a step: `pieces` of others' bands, then of its band and the guide, then of `latents`."""

    pieces: float
    rest: float
    latents: float = 0.0

    @property
    def all(self) -> float:
        """All messages."""
        return self.pieces + self.rest + self.latents


def forecast(scale: int, ranks: int, *, native: int = NATIVE, patches: int, branches: int = 2) -> list[Sent]:
    """What each rank sends in a step with so many patches, of which all get everything."""
    side = scale * native
    stacked = tuple((number * native, 0) for number in range(patches))
    windows = Windows((patches * native, native), (native, native), stacked)
    blend = BlendPlan.of(windows, merged(assign_units(patches, branches, ranks)), 1)
    return [
        Sent(
            pieces=_pieces(blend, group_rank, ranks) / side**2,
            rest=(ranks - 1) * blend.bands.size(group_rank) * native / side**2,
        )
        for group_rank in range(ranks)
    ]


def with_windows(
    scale: int, ranks: int, *, native: int = NATIVE, guide: bool, key: str = "", to: str = "regions"
) -> list[Sent]:
    """What each rank sends in a step with windows, where `key` moves them, or where they lie unmoved without one.

    `to`: of a prediction each rank gets its "regions", those of the "last" step, or "all" of it.
    """
    size = (scale * native, scale * native)
    windows = Tiling(moved=bool(key)).lay(size, (native, native), key=key)
    schedule = scheduled(len(windows) + guide, 2, ranks)
    blend = BlendPlan.of(windows, merged(schedule.assignment), 1)
    has_guide = [any(unit.patch == len(windows) for unit in units) for units in schedule.assignment]
    zones = Tiling().zones(size, (native, native))
    state = WindowPlan(zones=zones, schedule=schedule, interlace=Interlace.of(size, (native, native)))
    regions = None if to == "all" else NeededRegions.of(state, last=to == "last")
    needed = _everything(ranks, blend, native) if regions is None else _needed(regions, ranks)
    latent = size[0] * size[1]
    return [
        Sent(
            pieces=_pieces(blend, group_rank, ranks) / latent,
            rest=(needed[group_rank][0] + has_guide[group_rank] * needed[group_rank][1]) / latent,
            latents=(ranks - 1) * blend.bands.size(group_rank) / size[0] if to == "last" else 0.0,
        )
        for group_rank in range(ranks)
    ]


def _needed(regions: NeededRegions, ranks: int) -> list[tuple[int, int]]:
    """By place: what the others need of its band, and of the guide were it there."""
    others = [[other for other in range(ranks) if other != group_rank] for group_rank in range(ranks)]
    return [
        (sum(len(regions.parts[other][group_rank]) for other in each), sum(len(regions.cells[other]) for other in each))
        for group_rank, each in enumerate(others)
    ]


def _everything(ranks: int, blend: BlendPlan, native: int) -> list[tuple[int, int]]:
    width = blend.windows.size[1]
    return [
        ((ranks - 1) * blend.bands.size(group_rank) * width, (ranks - 1) * native**2) for group_rank in range(ranks)
    ]


def _pieces(blend: BlendPlan, group_rank: int, ranks: int) -> int:
    pieces = [piece for owner in range(ranks) if owner != group_rank for piece in blend.pieces(group_rank, owner)]
    return sum((p.rows.stop - p.rows.start) * (p.columns.stop - p.columns.start) for p in pieces)


def exposed(scale: int, sent: Sequence[Sent]) -> float:
    """Seconds that the two messages of a step take at most, the next once all of the first are there."""
    latent = CHANNELS * 2 * (scale * 128) ** 2
    first, second = (max(getattr(each, name) for each in sent) * latent / RATE for name in ("pieces", "rest"))
    return first + second + 2 * LATENCY


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What each rank sends: above the switch, below it, and in the last step."""

    before: list[Sent]
    after: list[Sent]
    last: list[Sent]


def stages(strategy: StructureGuidance, scale: int, ranks: int) -> Stages:
    """Of a strategy with overlapping windows and no teams."""
    guidance, guide = strategy.method.guidance, strategy.method.structure_strength > 0
    follows = guidance.strength(0) == 1 and guidance.decay == "none" and not guidance.masked
    return Stages(
        before=forecast(scale, ranks, patches=1 if follows else scale**2),
        after=with_windows(scale, ranks, guide=guide),
        last=with_windows(scale, ranks, guide=guide, to="last"),
    )


def mean(sent: Sequence[Sent]) -> float:
    """Of the ranks."""
    return fmean(each.all for each in sent)


def most(sent: Sequence[Sent]) -> float:
    """Of one rank."""
    return max(each.all for each in sent)


def of_image(strategy: StructureGuidance, found: Stages) -> float:
    """A step's mean over the ranks and over 50 steps with equal steps of time, the first with both branches."""
    early = round(STEPS * (1 - strategy.method.switch))
    before, after = (early + 1) * mean(found.before), (STEPS - early - 1) * mean(found.after)
    return (before + after + mean(found.last)) / STEPS


def table(strategies: dict[str, StructureGuidance], scales: tuple[int, ...]) -> Iterator[str]:
    """Rows for every strategy, size and number of ranks."""
    yield "| | ranks | above the switch | below it | most of a rank | last step | mean of an image | 1 Gbit/s |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, strategy in strategies.items():
        for scale in scales:
            for ranks in RANKS:
                found = stages(strategy, scale, ranks)
                means = [f"{mean(sent):.2f}" for sent in (found.before, found.after)]
                rest = [f"{value:.2f}" for value in (most(found.after), mean(found.last), of_image(strategy, found))]
                wait = f"{1000 * exposed(scale, found.after):.0f} ms"
                yield f"| {scale} x {scale}, {name} | {' | '.join([str(ranks), *means, *rest, wait])} |"


def rounds_of(patches: int, branches: int, ranks: int) -> float:
    """Return the duration of a step, in evaluations of all branches of a patch."""
    return -(-patches * branches // ranks) / branches
