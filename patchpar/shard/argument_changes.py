"""Whether a network's calls change what they are given, and something that later calls read."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from patchpar.comm.async_tensor import AsyncTensor
from patchpar.comm.pytree import tensors_in
from patchpar.shard.step_caches import are_as_before, held_by, written


class ArgumentChanges:
    """Of the calls of one network, in order. `begin` before and `matter` after each.

    A network that adds to its arguments in place, as UNets do to the residuals of a T2I-Adapter, gets copies from its
    pipeline. If it got the same memory again, what it computes would depend on the calls before.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._held: list[tuple[Tensor, int]] = []
        self._counts: list[int] = []
        self._changed: dict[int, StorageWeakRef] = {}
        self._is_given_again = False

    def begin(self, call: Any) -> None:
        """Note the arguments of a call."""
        live = {key: ref for key, ref in self._changed.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        self._changed = live
        # An async tensor is of this call, and reading more of it than its form would fetch it, on this rank only.
        self._tensors = [x for x in tensors_in(call) if not isinstance(x, AsyncTensor)]
        self._is_given_again = any(x.untyped_storage()._cdata in live for x in self._tensors)
        self._held, self._counts = held_by(call), written(self._tensors)

    def matter(self, sample: Any, call: Any) -> bool:
        """Whether the call has changed its sample, or an object among its arguments, or got what others changed."""
        now = written(self._tensors)
        changed = [x for x, before, after in zip(self._tensors, self._counts, now, strict=True) if before != after]
        for storage in [x.untyped_storage() for x in changed]:
            self._changed[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        of_sample = {id(x) for x in tensors_in(sample)}
        held_as_before = are_as_before(self._held, held_by(call))
        self._tensors, self._held = [], []
        return self._is_given_again or not held_as_before or any(id(x) in of_sample for x in changed)
