"""The device mesh: one named axis per kind of parallelism. Pure arithmetic, no process groups.

"Axis" always means a mesh axis; "dim" always means a tensor dimension. With data=1, cfg=2, patch=2 on 4 ranks:

    rank        0  1  2  3
    cfg         0  0  1  1     the guidance branch
    patch       0  1  0  1     the band of rows; neighbours in the image are neighbours in rank
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

# outermost first: the axis that communicates most has neighbouring ranks
AXES = ("data", "cfg", "stage", "patch", "tensor")


class Axis(NamedTuple):
    """One mesh axis: `rank` is this process's group rank; `ranks` the global rank of each group rank.

    `ratio`: the work of each group rank in proportion; empty if all have the same.
    """

    name: str
    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    ratio: tuple[int, ...] = ()

    @property
    def before(self) -> int | None:
        """Global rank of the previous group rank, or None at the first."""
        return self.ranks[self.rank - 1] if self.rank > 0 else None

    @property
    def after(self) -> int | None:
        """Global rank of the next group rank, or None at the last."""
        return self.ranks[self.rank + 1] if self.rank + 1 < self.size else None

    @property
    def others(self) -> tuple[int, ...]:
        """Group ranks (not global ranks) of all others, the nearest first."""
        return _nearest_first(self.rank, self.size)

    @property
    def other_ranks(self) -> tuple[int, ...]:
        """Global ranks of all others, in the order of `others`."""
        return tuple([self.ranks[other] for other in self.others])


@cache
def _nearest_first(rank: int, size: int) -> tuple[int, ...]:
    return tuple(sorted((p for p in range(size) if p != rank), key=lambda p: abs(p - rank)))


class Mesh:
    """Named axes over `ranks`, seen from global rank `me`, e.g. `Mesh(me=3, ranks=range(8), cfg=2, patch=4)`.

    Raises ValueError for an unknown axis, and for degrees whose product is not the number of ranks.
    """

    def __init__(self, me: int, ranks: Sequence[int], **degrees: int) -> None:
        self.ranks, self._me = tuple(ranks), me
        unknown = set(degrees) - set(AXES)
        if unknown:
            raise ValueError(f"unknown mesh axes {sorted(unknown)}: use {', '.join(AXES)}")
        product = 1
        for degree in degrees.values():
            product *= degree
        if product != len(self.ranks):
            shape = " x ".join(f"{name}={degree}" for name, degree in degrees.items())
            raise ValueError(f"{shape} = {product} ranks, but the mesh has {len(self.ranks)}")
        self._axes = {}
        group_rank, stride = self.ranks.index(me), product
        for name in AXES:
            size = degrees.get(name, 1)
            stride //= size
            mine = group_rank // stride % size
            first = group_rank - mine * stride
            self._axes[name] = Axis(name, mine, size, tuple(self.ranks[first + i * stride] for i in range(size)))

    def __getitem__(self, name: str) -> Axis:
        return self._axes[name]

    def with_ratio(self, ratio: tuple[int, ...]) -> "Mesh":
        """Let the ranks of axis patch have work in proportion to `ratio`, see Axis; return this mesh."""
        self._axes["patch"] = self._axes["patch"]._replace(ratio=ratio)
        return self

    def of_one_image(self) -> Axis:
        """Return the axis of all ranks that work on the same images as this one."""
        data = self["data"]
        size = len(self.ranks) // data.size
        ranks = self.ranks[data.rank * size : (data.rank + 1) * size]
        return Axis("image", ranks.index(self._me), size, ranks)

    def of_all(self) -> Axis:
        """Return the axis of all ranks of the mesh."""
        return Axis("all", self.ranks.index(self._me), len(self.ranks), self.ranks)

    def of_one_branch(self) -> Axis:
        """Return the axis of those of them that compute the same guidance branches as this one."""
        size = self["stage"].size * self["patch"].size * self["tensor"].size
        index = self.ranks.index(self._me)
        first = index - index % size
        return Axis("branch", index - first, size, self.ranks[first : first + size])

    def of_same_features(self) -> Axis:
        """Return the axis of those of them that hold the same features as this one, by axis `tensor`."""
        image, tensor = self.of_one_image(), self["tensor"]
        ranks = image.ranks[tensor.rank :: tensor.size]
        return Axis("features", ranks.index(self._me), len(ranks), ranks)


def rank_sets(ranks: Sequence[int], **degrees: int) -> list[tuple[int, ...]]:
    """Return the global ranks of every axis, image and branch, and those of equal features, of a mesh over `ranks`."""
    meshes = [Mesh(rank, ranks, **degrees) for rank in ranks]
    found = [mesh[name].ranks for name in AXES for mesh in meshes] + [mesh.of_one_image().ranks for mesh in meshes]
    found += [mesh.of_one_branch().ranks for mesh in meshes] + [mesh.of_same_features().ranks for mesh in meshes]
    return list(dict.fromkeys(ranks for ranks in found if len(ranks) > 1))
