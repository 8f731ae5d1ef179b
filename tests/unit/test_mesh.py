"""Who is who on a mesh of named axes."""

from __future__ import annotations

import math
from itertools import product

import pytest

from patchpar.plan.mesh import AXES, Axis, Mesh, rank_sets


@pytest.mark.parametrize(
    "degrees", [(1, 1, 1, 4, 1), (1, 2, 1, 2, 1), (2, 2, 3, 1, 1), (3, 1, 2, 1, 2), (1, 1, 1, 1, 1)]
)
def test_every_rank_has_a_group_rank_of_its_own(degrees: tuple[int, ...]) -> None:
    sizes = dict(zip(AXES, degrees, strict=True))
    ranks = range(math.prod(degrees))
    positions = {me: tuple(Mesh(me, ranks, **sizes)[name].rank for name in AXES) for me in ranks}
    assert sorted(positions.values()) == sorted(product(*(range(size) for size in degrees)))
    for me in ranks:
        for name in AXES:
            axis = Mesh(me, ranks, **sizes)[name]
            assert axis.ranks[axis.rank] == me
            for other in axis.ranks:  # the others of an axis see the same axis
                assert Mesh(other, ranks, **sizes)[name].ranks == axis.ranks


def test_neighbours_in_the_image_are_neighbours_in_rank() -> None:
    mesh = Mesh(5, range(8), cfg=2, patch=4)
    assert mesh["cfg"] == Axis("cfg", 1, 2, (1, 5))
    assert mesh["patch"] == Axis("patch", 1, 4, (4, 5, 6, 7))
    assert (mesh["patch"].before, mesh["patch"].after) == (4, 6)
    assert mesh["data"] == Axis("data", 0, 1, (5,))


def test_ranks_of_the_same_features() -> None:
    """Of an image's ranks those with the same group rank on axis `tensor`."""
    mesh = Mesh(6, range(8), data=2, patch=2, tensor=2)
    assert mesh.of_one_image() == Axis("image", 2, 4, (4, 5, 6, 7))
    assert mesh.of_same_features() == Axis("features", 1, 2, (4, 6))
    assert Mesh(3, range(4), tensor=4).of_same_features() == Axis("features", 0, 1, (3,))
    assert Mesh(1, range(2), patch=2).of_same_features().ranks == (0, 1)
    assert (0, 2) in rank_sets(range(4), patch=2, tensor=2)
    assert {(0, 1, 2, 3), (4, 5, 6, 7)} < {*rank_sets(range(8), cfg=2, patch=2, tensor=2)}, "of guidance branches"
    assert Mesh(6, range(8), cfg=2, stage=2, patch=2).of_one_branch() == Axis("branch", 2, 4, (4, 5, 6, 7))


def test_the_ends_of_an_axis() -> None:
    first, last = (Mesh(me, range(3), patch=3)["patch"] for me in (0, 2))
    assert (first.before, first.after) == (None, 1)
    assert (last.before, last.after) == (1, None)


def test_others_are_group_ranks_and_the_nearest_comes_first() -> None:
    assert Mesh(0, range(4), patch=4)["patch"].others == (1, 2, 3)
    assert Mesh(2, range(4), patch=4)["patch"].others == (1, 3, 0)
    assert Mesh(6, [4, 5, 6, 7], patch=4)["patch"].others == (1, 3, 0)


def test_what_does_not_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(ValueError, match="cfg=2 x patch=3 = 6 ranks, but the mesh has 4"):
        Mesh(0, range(4), cfg=2, patch=3)
    with pytest.raises(ValueError, match=r"unknown mesh axes .*ring.*use data, cfg, stage, patch"):
        Mesh(0, range(2), ring=2)


@pytest.mark.parametrize(
    "degrees", [(1, 1, 1, 4, 1), (1, 2, 1, 2, 1), (2, 2, 3, 1, 1), (1, 1, 1, 1, 2), (1, 1, 1, 1, 1)]
)
def test_the_sets_of_ranks_are_those_of_all_axes_and_images(degrees: tuple[int, ...]) -> None:
    sizes, num_ranks = dict(zip(AXES, degrees, strict=True)), math.prod(degrees)
    found = rank_sets(range(num_ranks), **sizes)
    assert len(set(found)) == len(found)
    for me in range(num_ranks):
        mesh = Mesh(me, range(num_ranks), **sizes)
        for axis in (*(mesh[name] for name in AXES), mesh.of_one_image(), mesh.of_one_branch()):
            assert (axis.ranks in found) == (axis.size > 1)
    assert all(list(ranks) == sorted(ranks) for ranks in found)
