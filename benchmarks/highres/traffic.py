"""What a rank sends in a step of a large picture, from the geometry alone, in units of the latent.

    above the switch   patches by bands of rows to who completes them, bands to all
    below it           what windows cover of others' bands, bands to all, the guide to all

After guidance, so of one branch; the first step sends every branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from patchpar import StructureGuidance
from patchpar.highres.blending import Blend
from patchpar.highres.windows import Tiling, Windows
from patchpar.highres.work import merged, share_out

STEPS, NATIVE, GRID = 50, 64, 1
RANKS = (2, 3, 4, 8)
CHANNELS, RATE, LATENCY = 4, 125e6, 1e-3  # of a latent; bytes per second; seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """By one rank in a step: `pieces` of others' bands, then its band and the guide to all."""

    pieces: float
    rest: float

    @property
    def all(self) -> float:
        """Both messages."""
        return self.pieces + self.rest


def forecast(
    scale: int, ranks: int, *, native: int = NATIVE, patches: int | None, guide: bool = False, branches: int = 2
) -> list[Sent]:
    """What each rank sends in a step with so many patches, or with windows where that is None."""
    side = scale * native
    if patches is None:
        windows = Tiling(moved=False).lay((side, side), (native, native), key="")
    else:
        stacked = tuple((number * native, 0) for number in range(patches))
        windows = Windows((patches * native, native), (native, native), stacked)
    shares = share_out(len(windows) + guide, branches, ranks)
    whole = Blend.of(windows, merged(shares), 1)
    guides = [ranks - 1 if any(unit.patch == len(windows) for unit in units) else 0 for units in shares]
    return [
        Sent(
            pieces=_pieces(whole, place, ranks) / side**2,
            rest=((ranks - 1) * whole.bands.size(place) * windows.size[1] + copies * native**2) / side**2,
        )
        for place, copies in enumerate(guides)
    ]


def _pieces(blend: Blend, place: int, ranks: int) -> int:
    pieces = [piece for owner in range(ranks) if owner != place for piece in blend.pieces(place, owner)]
    return sum((p.rows.stop - p.rows.start) * (p.columns.stop - p.columns.start) for p in pieces)


def exposed(scale: int, sent: Sequence[Sent]) -> float:
    """Seconds that the two messages of a step take at most, the next once all of the first are there."""
    latent = CHANNELS * 2 * (scale * 128) ** 2
    first, second = (max(getattr(each, name) for each in sent) * latent / RATE for name in ("pieces", "rest"))
    return first + second + 2 * LATENCY


def of_picture(strategy: StructureGuidance, scale: int, ranks: int) -> float:
    """A step's mean over the ranks and over 50 steps with equal steps of time."""
    first, before, after = _stages(strategy, scale, ranks)
    early = round(STEPS * (1 - strategy.method.switch))
    return (2 * first + (early - 1) * before + (STEPS - early) * after) / STEPS


def _stages(strategy: StructureGuidance, scale: int, ranks: int) -> tuple[float, float, float]:
    """The mean over the ranks: of a branch in the first step, of a step above the switch, of one below it."""
    guidance = strategy.method.guidance
    follows = guidance.strength(0) == 1 and guidance.decay == "none" and not guidance.masked
    patches = 1 if follows else scale**2
    before = fmean(each.all for each in forecast(scale, ranks, patches=patches))
    after = fmean(each.all for each in forecast(scale, ranks, patches=None, guide=strategy.method.kept > 0))
    return before, before, after


def table(strategies: dict[str, StructureGuidance], scales: tuple[int, ...]) -> Iterator[str]:
    """Rows for every strategy, size and number of ranks."""
    yield "| | ranks | above the switch | below it | most of a rank | mean of a picture | 1 Gbit/s |"
    yield "|---|---|---|---|---|---|---|"
    for name, strategy in strategies.items():
        for scale in scales:
            for ranks in RANKS:
                _, before, after = _stages(strategy, scale, ranks)
                late = forecast(scale, ranks, patches=None, guide=strategy.method.kept > 0)
                most, wait = max(each.all for each in late), 1000 * exposed(scale, late)
                mean = of_picture(strategy, scale, ranks)
                cells = f"{ranks} | {before:.2f} | {after:.2f} | {most:.2f} | {mean:.2f} | {wait:.0f} ms"
                yield f"| {scale} x {scale}, {name} | {cells} |"
