"""What a rank sends in a step of a large picture, from the geometry alone, in units of the latent.

    above the switch   patches by bands of rows to who completes them, bands to all
    below it           what windows cover of others' bands, bands to all, the guide to all

After guidance, so of one branch; the first step sends every branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from patchpar import StructureGuidance
from patchpar.highres.blending import Blend
from patchpar.highres.windows import Tiling, Windows
from patchpar.highres.work import merged, share_out

STEPS, NATIVE, GRID = 50, 64, 1
RANKS = (2, 3, 4, 8)
Shares = list[tuple[object, ...]]


def forecast(
    scale: int, ranks: int, *, native: int = NATIVE, patches: int | None, guide: bool = False, branches: int = 2
) -> list[float]:
    """What each rank sends in a step with so many patches, or with windows where that is None."""
    side = scale * native
    if patches is None:
        windows = Tiling(moved=False).lay((side, side), (native, native), key="")
    else:
        stacked = tuple((number * native, 0) for number in range(patches))
        windows = Windows((patches * native, native), (native, native), stacked)
    shares = share_out(len(windows) + guide, branches, ranks)
    whole = Blend.of(windows, merged(shares), 1)
    sent = [_cells(whole, place, windows.size[1], ranks) for place in range(ranks)]
    guides = [ranks - 1 if any(unit.patch == len(windows) for unit in units) else 0 for units in shares]
    return [(cells + copies * native**2) / side**2 for cells, copies in zip(sent, guides, strict=True)]


def _cells(blend: Blend, place: int, width: int, ranks: int) -> int:
    pieces = [piece for owner in range(ranks) if owner != place for piece in blend.pieces(place, owner)]
    covered = sum((p.rows.stop - p.rows.start) * (p.columns.stop - p.columns.start) for p in pieces)
    return covered + (ranks - 1) * blend.bands.size(place) * width


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
    before = fmean(forecast(scale, ranks, patches=patches))
    after = fmean(forecast(scale, ranks, patches=None, guide=strategy.method.kept > 0))
    return before, before, after


def table(strategies: dict[str, StructureGuidance], scales: tuple[int, ...]) -> Iterator[str]:
    """Rows for every strategy, size and number of ranks."""
    yield "| | ranks | above the switch | below it | most of a rank | mean of a picture |"
    yield "|---|---|---|---|---|---|"
    for name, strategy in strategies.items():
        for scale in scales:
            for ranks in RANKS:
                _, before, after = _stages(strategy, scale, ranks)
                most = max(forecast(scale, ranks, patches=None, guide=strategy.method.kept > 0))
                mean = of_picture(strategy, scale, ranks)
                yield f"| {scale} x {scale}, {name} | {ranks} | {before:.2f} | {after:.2f} | {most:.2f} | {mean:.2f} |"
