"""Bands cover every row once, start at multiples of the unit, and keep their borders on coarser and finer maps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest

from patchpar.plan.bands import Bands, Stencil, split_bands, starts_of

SPLITS = [(t, p, u) for t in (8, 16, 33, 40, 61, 128, 135) for p in range(1, 6) for u in (1, 2, 8) if t // u >= p]


@pytest.mark.parametrize(("total", "ranks", "unit"), SPLITS)
def test_every_row_belongs_to_one_rank(total: int, ranks: int, unit: int) -> None:
    bands = split_bands(total, ranks, unit)
    assert len(bands) == ranks
    assert bands.starts[0] == 0
    assert bands.total == total
    assert sum(bands.size(group_rank) for group_rank in range(ranks)) == total
    assert all(start % unit == 0 for start in bands.starts[:-1])
    assert min(bands.size(group_rank) for group_rank in range(ranks)) >= unit


def test_bands_differ_by_one_unit_at_most_and_the_last_takes_the_remainder() -> None:
    assert split_bands(40, 3, 8).starts == (0, 16, 32, 40)
    assert split_bands(43, 3, 8).starts == (0, 16, 32, 43)


@pytest.mark.parametrize(
    ("total", "unit", "ratio", "starts"),
    [
        (40, 8, (3, 1), (0, 32, 40)),
        (43, 8, (1, 3), (0, 8, 43)),
        (64, 8, (1, 1), (0, 32, 64)),
        (64, 8, (2, 1, 1), (0, 32, 48, 64)),
        (32, 8, (1000, 1, 1), (0, 16, 24, 32)),  # each has one unit at least
        (16, 8, (1, 1000), (0, 8, 16)),
    ],
)
def test_bands_in_a_ratio(total: int, unit: int, ratio: tuple[int, ...], starts: tuple[int, ...]) -> None:
    assert split_bands(total, len(ratio), unit, ratio).starts == starts


@pytest.mark.parametrize("units", [3, 9, 16])
@pytest.mark.parametrize("ratio", [(21, 11, 1), (2, 2, 1), (1, 1, 1), (5, 3, 97), (100, 90, 10)])
def test_no_other_parts_end_sooner(units: int, ratio: tuple[int, ...]) -> None:
    """A step is over when the last rank has computed its part."""

    def seconds(sizes: Sequence[int]) -> float:
        return max(size / part for size, part in zip(sizes, ratio, strict=True))

    found = [after - before for before, after in pairwise(starts_of(units, 3, ratio))]
    parts = (each for each in product(range(1, units), repeat=3) if sum(each) == units)
    assert seconds(found) == min(map(seconds, parts))


def test_a_slow_rank_gets_no_part_for_which_all_wait() -> None:
    assert starts_of(16, 2, (21, 11)) == (0, 11, 16)


@pytest.mark.parametrize("units", [2, 5, 17, 64])
@pytest.mark.parametrize("ratio", [(1, 1), (3, 1), (7, 5), (1, 100)])
def test_a_ratio_is_met_within_a_unit(units: int, ratio: tuple[int, ...]) -> None:
    found = starts_of(units, 2, ratio)
    assert found[0] == 0
    assert found[-1] == units
    assert 0 < found[1] < units
    assert abs(found[1] - units * ratio[0] / sum(ratio)) <= 1


def test_too_few_units_are_refused_with_the_figures() -> None:
    with pytest.raises(ValueError, match="40 latent rows make 5 bands of 8 rows, too few for 6 ranks"):
        split_bands(40, 6, 8)


@pytest.mark.parametrize("total", [32, 33, 35, 36, 39, 41])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_levels_of_a_unet_halve_the_bands_rounding_up(total: int, stride: int) -> None:
    bands = split_bands(total, 2, 8)
    expected = tuple(-(-start // stride) for start in bands.starts)
    for group_rank in range(2):
        own = expected[group_rank + 1] - expected[group_rank]
        assert bands.at_level(group_rank, own, total).starts == expected


def test_an_enlarged_map() -> None:
    assert Bands((0, 16, 40)).at_level(1, 48, 40).starts == (0, 32, 80)


def test_a_map_that_belongs_to_no_level_is_refused() -> None:
    with pytest.raises(ValueError, match="7 rows of this rank"):
        Bands((0, 16, 40)).at_level(0, 7, 40)


@pytest.mark.parametrize(
    ("extent", "stride", "padding", "before", "after", "outputs"),
    [
        (3, 1, 1, 1, 1, (1, 1)),  # the common convolution
        (3, 2, 1, 1, 0, (1, 0)),  # down-sampling
        (3, 2, 0, 0, 1, (0, 1)),  # down-sampling, padded at the end by the model
        (5, 1, 2, 2, 2, (2, 2)),  # also kernel 3 with dilation 2
        (5, 2, 2, 2, 1, (1, 1)),
        (7, 2, 3, 3, 2, (2, 1)),
        (2, 2, 0, 0, 0, (0, 0)),  # blocks that do not overlap
    ],
)
def test_what_a_convolution_reads_of_its_neighbours(
    extent: int, stride: int, padding: int, before: int, after: int, outputs: tuple[int, int]
) -> None:
    stencil = Stencil(extent, stride, padding)
    assert (stencil.before, stencil.after) == (before, after)
    assert (stencil.outputs_before(), stencil.outputs_after()) == outputs
