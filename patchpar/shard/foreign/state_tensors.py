"""Tensors that foreign code keeps from one call to the next: of split calls, and those of plain calls for them."""

import torch
from torch import Tensor

from patchpar.shard.foreign.kept_state import SavedState


class StateTensors:
    """The tensors that calls so far have kept, each with what the plain call has kept for it, if that is known."""

    def __init__(self) -> None:
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of a kept tensor: it, and the plain call's
        self._made: dict[int, Tensor] = {}  # of split calls that were not compared

    def for_plain_call(self, before: SavedState) -> tuple[dict[int, Tensor], bool]:
        """Return what the plain call finds for tensors, of any shape, of split calls; whether any is NaN, unknown."""
        twins, unknown = dict[int, Tensor](), False
        for x in before.tensors.values():
            if id(x) in self._twins:
                twins[id(x)] = self._twins[id(x)][1]
            elif id(x) in self._made:
                unknown = True
                twins[id(x)] = torch.full_like(x, torch.nan) if x.is_floating_point() else x
        return twins, unknown

    def pair(self, after: SavedState, plain_after: SavedState) -> None:
        """Note which tensor the plain call has kept where the split call has kept its own."""
        pairs = ((x, plain_after.tensors.get(path)) for path, x in after.tensors.items())
        self._twins = {id(x): (x, twin) for x, twin in pairs if twin is not None and twin is not x}
        kept = {id(x) for x in after.tensors.values()}
        self._made = {key: x for key, x in self._made.items() if key in kept and key not in self._twins}

    def note(self, before: SavedState, after: SavedState) -> None:
        """Note tensors that a call has kept without a comparison."""
        was, kept = ({id(x): x for x in state.tensors.values()} for state in (before, after))
        self._made = {key: x for key, x in kept.items() if key not in was or key in self._made}
        self._twins = {key: pair for key, pair in self._twins.items() if key in kept}
