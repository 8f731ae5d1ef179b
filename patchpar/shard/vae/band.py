"""What one rank knows while a VAE runs on its band of rows: where it is, and which rows beyond it are known or coming.

Shape letters as in `shard.unet.layers`; "rows" are slices along the dim that is split.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.collectives import ExchangePart, Halo, Received
from patchpar.shard.local_patch import LocalPatch

NOTHING = Halo(None, None)


class NeighbourRows(NamedTuple):
    """The neighbours' rows next to one tensor of ours.

    `halo` waits for them. `padded`: how many rows the model itself has added to the tensor, before and after; where
    there is a neighbour they stand for its rows. `norm`: the group norm they came with.
    """

    of: "weakref.ref[Tensor]"
    halo: Callable[[], Halo]
    padded: tuple[int, int] = (0, 0)
    norm: str = ""


@dataclass(slots=True)
class VaeBand:
    """One rank's run of a VAE. `where`: the layer it is in. `feeds`: whether a group norm's edge rows are of use.

    `exchanging` off computes every band alone, wrong on purpose, as the negative control of tests.
    """

    patch: LocalPatch
    feeds: dict[str, bool] = field(default_factory=dict)
    exchanging: bool = True
    where: str = ""
    _beyond: NeighbourRows | None = None

    @property
    def dim(self) -> int:
        """Which dim is split, counted from the end."""
        return self.patch.dim

    def scaled(self, own: int, group_rank: int) -> int:
        """What another place has where we have `own` of something that grows with the rows."""
        bands = self.patch.bands
        return own * bands.size(group_rank) // bands.size(self.patch.group_rank)

    def before(self, own: int) -> int:
        """What all places before ours have together."""
        return own * self.patch.bands.starts[self.patch.group_rank] // self.patch.bands.size(self.patch.group_rank)

    def whole(self, own: int) -> int:
        """What all places have together."""
        return own * self.patch.bands.total // self.patch.bands.size(self.patch.group_rank)

    def fits(self, own: int) -> bool:
        """Whether every place has a whole number of what we have `own` of."""
        bands = self.patch.bands
        size = bands.size(self.patch.group_rank)
        return all(own * bands.size(group_rank) % size == 0 for group_rank in range(len(bands)))

    # --- exchange -----------------------------------------------------------------------------------------------

    def start(self, shared: Sequence[Tensor], edges: ExchangePart | None) -> Callable[[], tuple[Received, Halo]]:
        """Send `shared` to all and edge rows to the neighbours; what is returned waits for theirs."""
        if not self.exchanging:
            return lambda: ({}, NOTHING)
        edges = None if edges is None else edges.kept()  # or the whole map would stay until they have been waited for
        return self.patch.comm.gather_with_edges(self.patch.axis, self.where, shared, edges).wait

    def fetch(self, x: Tensor, before: int, after: int) -> Callable[[], Halo]:
        """Start to get the rows beyond `x`; what is returned waits for them."""
        if not (before or after):
            return lambda: NOTHING
        wait = self.start([], self.patch.edges(x, before, after))
        return lambda: wait()[1]

    # --- rows that came with something else -----------------------------------------------------------------------

    def leave(self, beyond: NeighbourRows) -> None:
        """Keep the rows beyond a tensor for the function that takes it next."""
        if self._beyond is not None and self._beyond.norm and self._beyond.norm != beyond.norm:
            self.feeds.setdefault(self._beyond.norm, False)
        self._beyond = beyond

    def beyond(self, x: Tensor) -> NeighbourRows | None:
        """The rows beyond `x`, if they are known or coming."""
        found = self._beyond
        return found if found is not None and found.of() is x else None

    def finish(self) -> None:
        """The VAE has run."""
        if self._beyond is not None and self._beyond.norm:
            self.feeds.setdefault(self._beyond.norm, False)
        self._beyond = None

    def take(self, x: Tensor) -> NeighbourRows | None:
        """The same, and they are of use."""
        found = self.beyond(x)
        if found is not None:
            self._beyond = None
            if found.norm:
                self.feeds[found.norm] = True
        return found

    def settle(self, args: Sequence[object]) -> None:
        """Put the neighbours' rows into a padded tensor that something else than a convolution is about to read."""
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
    """The rows beyond what a function made of the tensor, which does the same to them."""

    def halo() -> Halo:
        return Halo(*(None if rows is None else change(rows) for rows in beyond.halo()))

    return beyond._replace(of=weakref.ref(to), halo=halo)
