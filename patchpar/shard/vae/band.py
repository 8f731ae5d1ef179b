"""The state of one rank while a VAE runs on its band of rows: its position, and the neighbours' rows it has or awaits.

Shape letters as in `shard.unet.layers`; "rows" are slices along the dim that is split. Maps are [B, C, h, W], or
[B, C, F, h, W] of videos with F frames.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart, Halo, Received
from patchpar.shard.local_patch import LocalPatch

NOTHING = Halo(None, None)


class NeighbourRows(NamedTuple):
    """The neighbours' rows next to one tensor of this rank.

    `halo` waits for them. `padded`: how many rows the model itself has padded before and after; at a neighbour they are
    to be replaced by its rows. `norm`: the group norm whose exchange carried them.
    """

    of: "weakref.ref[Tensor]"
    halo: Callable[[], Halo]
    padded: tuple[int, int] = (0, 0)
    norm: str = ""


@dataclass(slots=True)
class VaeBand:
    """One rank's run of a VAE. `where`: the current layer. `feeds`: whether a group norm's edge rows are used.

    `frames`: of the map convolved last, which are those of a mask whose values are not known.

    `exchanging` off computes every band alone, wrong on purpose, as the negative control of tests.
    """

    patch: LocalPatch
    feeds: dict[str, bool] = field(default_factory=dict)
    exchanging: bool = True
    frames: int = 1
    where: str = ""
    _beyond: NeighbourRows | None = None

    @property
    def dim(self) -> int:
        """The split dim, counted from the end."""
        return self.patch.dim

    def scaled(self, own: int, group_rank: int) -> int:
        """Return how many another rank has where this one has `own` of something proportional to the rows."""
        bands = self.patch.bands
        return own * bands.size(group_rank) // bands.size(self.patch.group_rank)

    def before(self, own: int) -> int:
        """Return how many all ranks before this one have together."""
        return own * self.patch.bands.starts[self.patch.group_rank] // self.patch.bands.size(self.patch.group_rank)

    def whole(self, own: int) -> int:
        """Return how many all ranks have together."""
        return own * self.patch.bands.total // self.patch.bands.size(self.patch.group_rank)

    def fits(self, own: int) -> bool:
        """Whether every rank has an integral number where this one has `own`."""
        bands = self.patch.bands
        size = bands.size(self.patch.group_rank)
        return all(own * bands.size(group_rank) % size == 0 for group_rank in range(len(bands)))

    # --- exchange -----------------------------------------------------------------------------------------------

    def start(self, shared: Sequence[Tensor], edges: ExchangePart | None) -> Callable[[], tuple[Received, Halo]]:
        """Send `shared`, of the same shape on all ranks, to all and edge rows [B, C, ..., r, W] to the neighbours.

        The returned function waits for theirs and raises ExchangeError.
        """
        if not self.exchanging:
            return lambda: ({}, NOTHING)
        edges = None if edges is None else edges.kept()  # views would keep the whole map in memory until the wait
        return self.patch.comm.gather_with_edges(self.patch.axis, self.where, shared, edges).wait

    def fetch(self, x: Tensor, before: int, after: int) -> Callable[[], Halo]:
        """Start to receive the rows beyond x [B, C, ..., h, W]; the returned function waits for them."""
        if not (before or after):
            return lambda: NOTHING
        wait = self.start([], self.patch.edges(x, before, after))
        return lambda: wait()[1]

    # --- rows that were exchanged with something else -------------------------------------------------------------

    def leave(self, beyond: NeighbourRows) -> None:
        """Store the rows beyond a tensor for the next function that reads it."""
        if self._beyond is not None and self._beyond.norm and self._beyond.norm != beyond.norm:
            self.feeds.setdefault(self._beyond.norm, False)
        self._beyond = beyond

    def beyond(self, x: Tensor) -> NeighbourRows | None:
        """Return the rows beyond x [B, C, ..., h, W] if they have been received or are in flight."""
        found = self._beyond
        return found if found is not None and found.of() is x else None

    def finish(self) -> None:
        """End the run of the VAE."""
        if self._beyond is not None and self._beyond.norm:
            self.feeds.setdefault(self._beyond.norm, False)
        self._beyond = None

    def take(self, x: Tensor) -> NeighbourRows | None:
        """Remove and return the rows beyond x [B, C, ..., h, W], and record that the norm's edge rows are used."""
        found = self.beyond(x)
        if found is not None:
            self._beyond = None
            if found.norm:
                self.feeds[found.norm] = True
        return found

    def settle(self, args: Sequence[object]) -> None:
        """Write the neighbours' rows into a padded tensor among `args`, before a function that is no convolution."""
        found = self._beyond
        if found is None or not any(found.padded):
            return
        x = found.of()
        if x is None or not any(arg is x or (isinstance(arg, (list, tuple)) and _holds(arg, x)) for arg in args):
            return
        self._beyond = None
        before, after = found.padded
        halo, dim = found.halo(), self.dim
        if halo.before is not None:
            x.narrow(dim, 0, before).copy_(halo.before)
        if halo.after is not None:
            x.narrow(dim, x.shape[dim] - after, after).copy_(halo.after)


def _holds(args: Sequence[object], x: Tensor) -> bool:
    return any(arg is x for arg in args)


def moved(beyond: NeighbourRows, to: Tensor, change: Callable[[Tensor], Tensor]) -> NeighbourRows:
    """Return the rows beyond `to` [B, C, ..., h, W], the result of a function that changes rows as `change` does."""

    def halo() -> Halo:
        return Halo(*(None if rows is None else change(rows) for rows in beyond.halo()))

    return beyond._replace(of=weakref.ref(to), halo=halo)
