"""Units are shared out completely and as evenly as they can be."""

from __future__ import annotations

from itertools import chain

import pytest

from benchmarks.highres.traffic import rounds_of
from patchpar.strategies.structure.windows import Tiling
from patchpar.strategies.structure.work_schedule import Evaluation, Unit, assign_units, evaluations_of


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 20])
@pytest.mark.parametrize(("patches", "branches"), [(4, 1), (4, 2), (9, 2), (9, 3)])
def test_every_unit_once_and_no_rank_one_more_than_needed(patches: int, branches: int, ranks: int) -> None:
    parts = assign_units(patches, branches, ranks)
    assert list(chain(*parts)) == [Unit(p, b) for p in range(patches) for b in range(branches)]
    sizes = [len(units) for units in parts]
    assert len(parts) == ranks
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes)  # the anchor's rank, the first, has no more than others
    assert max(sizes) == rounds_of(patches, branches, ranks) * branches


def test_both_branches_of_a_patch_are_one_call() -> None:
    units = assign_units(4, 2, 3)[2]
    assert units == (Unit(2, 1), Unit(3, 0), Unit(3, 1))
    assert evaluations_of(units, 2) == [Evaluation(2, (1,)), Evaluation(3, (0, 1))]
    assert evaluations_of((Unit(0, 0), Unit(0, 1)), 3) == [Evaluation(0, (0,)), Evaluation(0, (1,))]


@pytest.mark.parametrize(
    ("scale", "one", "four", "eight"),
    [(2, 325, 87.5, 50), (3, 850, 225, 125), (4, 1625, 412.5, 212.5)],
)
def test_work_of_fifty_steps(scale: int, one: float, four: float, eight: float) -> None:
    """25 steps of interlaced patches and 25 of windows with an overlap of one half, in evaluations of both branches.

    Patches and whole evaluations as the unit, as in the paper, take 100, 250 and 425 rounds on four ranks.
    """
    windows = len(Tiling().lay((scale * 128,) * 2, (128, 128), key=""))
    taken = [25 * rounds_of(scale**2, 2, ranks) + 25 * rounds_of(windows, 2, ranks) for ranks in (1, 4, 8)]
    assert taken == [one, four, eight]
