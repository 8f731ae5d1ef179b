"""How much ranks send each other in every strategy: counted with a tiny denoiser, and by formula for SDXL.

python -m benchmarks.volumes --write docs/figures/volumes.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import write_page
from benchmarks.volumes.formula import Volumes, cycle_of
from benchmarks.volumes.shapes import Shapes, embedded_shapes, rounds_of, sdxl, sdxl_shapes
from patchpar.plan.bands import split_bands
from patchpar.strategies import parse_strategy

PUBLISHED = "displaced:preset=paper"
STRATEGIES = (
    "exact",
    PUBLISHED,
    "displaced",
    "pcpp:context=paper",
    "pcpp",
    "fresh-edges",
    "fresh-edges:context=partials",
    "fresh-edges:bits=8",
    "fresh-edges:bits=4",
    "fresh-edges:correction=linear",
    "fresh-edges:context=pooled,pool=2",
    "fresh-edges:context=pooled",
    "fresh-edges:context=pooled,bits=8",
    "fresh-edges:context=pooled,bits=4",
)
EMBEDDED = Path(__file__).parents[2] / "assets" / "scenes-unet"
PIXELS, WORLDS, MOST = (1024, 2048, 3840), (2, 4), 8
EXCHANGE_POINTS = {"kv": 1, "halo": 1, "moments": 3, "correction": 1}
"""Kinds of values that seams exchange, and with how many digits their MB are told."""
INTRODUCTION = """\
# What ranks send each other

Bytes of one step after the exact ones at the beginning, by strategy; without options each has its defaults. \
**DistriFusion's** are those of `displaced:preset=paper`, which sends what its code sends: halos to everyone. \
`partials` is a mean, because each layer sends in every fourth step only."""


@dataclass(frozen=True, slots=True)
class Received:
    """MB that a rank receives in a step, by kind, what seams receive in all, and what it holds for the next."""

    by_kind: Mapping[str, float]
    held: float

    @property
    def points(self) -> float:
        """Keys, values, halo, moments, and how keys and values have changed."""
        return sum(self.by_kind[kind] for kind in EXCHANGE_POINTS)


def received(shapes: Shapes, world: int, strategy: str, group_rank: int, *, itemsize: int = 2) -> Received:
    """What comes to one place of a UNet whose bands begin at multiples of 4 rows, as those of SDXL do."""
    volumes = Volumes(
        shapes=shapes,
        bands=split_bands(shapes.prediction[-2], world, 4),
        policy=parse_strategy(strategy).policy,
        itemsize=itemsize,
    )
    by_kind = {kind: count / 1e6 for kind, count in volumes.received_per_step(group_rank).items()}
    return Received(by_kind, (sum(volumes.held(group_rank).values()) + volumes.arriving(group_rank)) / 1e6)


def inner(world: int) -> int:
    """A place with neighbours on both sides, where there is one."""
    return world // 2 if world > 2 else 0


def table_of_sdxl(shapes: Mapping[int, Shapes]) -> Iterator[str]:
    """Eight ranks, by kind."""
    kv_rounds, rounds = rounds_of(*sdxl())
    prediction = {p: received(shapes[p], MOST, "exact", inner(MOST)).by_kind["prediction"] for p in PIXELS}
    step_statistics = ", ".join(f"{megabytes:.3f} MB at {pixels}²" for pixels, megabytes in prediction.items())
    yield (
        f"SDXL base on {MOST} ranks, one guidance branch, half precision, from shapes alone. MB that an inner rank "
        "**receives** per step; it sends as much, because all bands are equally tall. A rank at the image's edge has "
        "one neighbour less: the sum of the first rank stands beside. Every strategy also joins the prediction, not "
        f"counted here: {step_statistics}. `held` is what a rank keeps for the next step, beside messages on their "
        f"way. An exact step is {kv_rounds} exchanges of keys and values and {rounds} others."
    )
    yield ""
    yield "| image | strategy | keys, values | halo | moments | correction | sum | first | of DistriFusion's | held |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for pixels in PIXELS:
        whole = received(shapes[pixels], MOST, PUBLISHED, inner(MOST)).points
        for strategy in STRATEGIES:
            own, first = (received(shapes[pixels], MOST, strategy, group_rank) for group_rank in (inner(MOST), 0))
            parts = " | ".join(
                f"{own.by_kind[kind]:.{digits}f}" for kind, digits in zip(EXCHANGE_POINTS, (1, 1, 3, 1), strict=True)
            )
            sums = f"{own.points:.1f} | {first.points:.1f} | {100 * own.points / whole:.1f} %"
            yield f"| {pixels}² | {strategy} | {parts} | {sums} | {own.held:.0f} |"


def table_of_fewer(shapes: Mapping[int, Shapes]) -> Iterator[str]:
    """Two and four ranks, sums only."""
    yield "The sums on fewer ranks, MB, and their share of DistriFusion's; of two ranks both are at the edge:"
    yield ""
    yield from _sums(shapes, WORLDS, itemsize=2, digits=1)


def table_of_embedded(shapes: Mapping[int, Shapes]) -> Iterator[str]:
    """The packaged UNet, as `benchmarks.quality` generates with it."""
    yield (
        "Embedded model, both guidance branches, fp32, from shapes alone: the sums that an inner rank receives, and "
        "their share of DistriFusion's. Its images are small, so that halos weigh more than in SDXL:"
    )
    yield ""
    yield from _sums(shapes, (4, MOST), itemsize=4, digits=2)


def _sums(shapes: Mapping[int, Shapes], worlds: Sequence[int], *, itemsize: int, digits: int) -> Iterator[str]:
    """A column for each size and number of ranks: MB with so many digits, and the share with one less."""
    columns = [(pixels, world) for pixels in shapes for world in worlds]
    yield "| strategy | " + " | ".join(f"{pixels}², {world} ranks" for pixels, world in columns) + " |"
    yield "|---|" + "---|" * len(columns)
    for strategy in STRATEGIES:
        cells = []
        for pixels, world in columns:
            own, whole = (
                received(shapes[pixels], world, each, inner(world), itemsize=itemsize).points
                for each in (strategy, PUBLISHED)
            )
            cells.append(f"{own:.{digits}f} ({100 * own / whole:.{digits - 1}f} %)")
        yield f"| {strategy} | " + " | ".join(cells) + " |"


def table_of_tiny(name: str = "sdxl", height: int = 36, width: int = 24) -> Iterator[str]:
    """Counted on real ranks. Ends the program where the formula differs."""
    from patchpar.launch.local import LocalExecutor

    yield (
        f"Tiny SDXL, fp32, batch 2, {height} x {width} latent: bytes that an inner rank receives per step, counted by "
        "the communicator. The formula gives the same to the byte for every rank, sent and received, and for what is "
        "held:"
    )
    yield ""
    yield "| ranks | strategy | keys and values | halo | moments | correction | prediction | counted | formula | held |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    with LocalExecutor(["cpu"] * 4, "tests.ranks:Ranks") as pool:
        for world in (2, 3, 4):
            args = (STRATEGIES, name, (height, width))
            found = pool.call("run", "benchmarks.volumes.counted:counted", world, "auto", args)[:world]
            for strategy in STRATEGIES:
                for rank, each in enumerate(found):
                    own, formula = each[strategy]["counted"], each[strategy]["formula"]
                    if own != formula:
                        raise SystemExit(f"{strategy}, rank {rank} of {world}: counted {own}, by formula {formula}")
                yield _row(world, strategy, found[inner(world)][strategy])


def _row(world: int, strategy: str, each: Mapping[str, Any]) -> str:
    cycle = cycle_of(parse_strategy(strategy).policy)
    steps = each["counted"]["received"][:cycle]
    counted, formula = (
        [sum(step.values()) for step in each[how]["received"][:cycle]] for how in ("counted", "formula")
    )
    kinds = " | ".join(
        f"{sum(step[kind] for step in steps) / len(steps):,.0f}" for kind in (*EXCHANGE_POINTS, "prediction")
    )
    sums = " | ".join(f"{sum(found) / len(found):,.0f}" for found in (counted, formula))
    return f"| {world} | {strategy} | {kinds} | {sums} | {each['counted']['held']:,} |"


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    shapes = sdxl_shapes(*PIXELS)
    generated = embedded_shapes(EMBEDDED, 256, 512)
    tables = (table_of_sdxl(shapes), table_of_fewer(shapes), table_of_embedded(generated), table_of_tiny())
    text = "\n".join([INTRODUCTION, *(line for table in tables for line in ("", *table)), ""])
    print(text)
    if options.write:
        write_page(text, options.write)


if __name__ == "__main__":
    main()
