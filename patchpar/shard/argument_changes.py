"""Whether a network's calls change what they are given, hold it for later calls, or give it back in their output."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from patchpar.comm.async_tensor import AsyncTensor
from patchpar.comm.banded_tensor import BandedTensor
from patchpar.comm.pytree import leaves, map_leaves, tensors_in


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
        # Such a tensor is of this call, and reading more of it than its form would fetch it, on this rank only.
        self._tensors = [x for x in tensors_in(call) if not isinstance(x, (AsyncTensor, BandedTensor))]
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


def held_by(tree: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors, of any shape, that objects in arguments hold, such as caches of keys of any class.

    Each comes with the number of times it has been written to.
    """
    found, seen = list[tuple[Tensor, int]](), set[int]()
    objects = [each for each in leaves(tree) if hasattr(each, "__dict__")]
    while objects:
        each = objects.pop()
        if id(each) in seen or isinstance(each, (Tensor, nn.Module, type)):
            continue
        seen.add(id(each))
        inner = list(leaves(vars(each)))
        found += [(x, 0 if x.is_inference() else x._version) for x in inner if isinstance(x, Tensor)]
        objects += [x for x in inner if hasattr(x, "__dict__") and not callable(x)]
    return found


def are_as_before(before: Sequence[tuple[Tensor, int]], now: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether the tensors held, of any shape, are the same as before, and none has been written to."""
    return [(id(x), version) for x, version in before] == [(id(x), version) for x, version in now]


def written(call: Any) -> list[int]:
    """Return how many times each tensor of a call has been written to; inference tensors have no such count."""
    return [0 if x.is_inference() else x._version for x in tensors_in(call)]


def gives_back(output: Any, call: Any) -> bool:
    """Whether `output` contains argument tensors of `call`."""
    given = {id(x) for x in tensors_in(call)}
    return any(id(leaf) in given for leaf in leaves(output))


def without_given(output: Any, call: Any) -> Any:
    """Return `output` with None for argument tensors of `call`."""
    given = {id(x) for x in tensors_in(call)}
    return map_leaves(lambda leaf: None if id(leaf) in given else leaf, output)


def with_given(joined: Any, output: Any, own: Any, whole: Any) -> Any:
    """Return `joined` with the tensors of the call `whole` where `output` has those of its part `own`."""
    given = {id(x): y for x, y in zip(tensors_in(own), tensors_in(whole), strict=True)}
    found = iter([given.get(id(leaf), other) for leaf, other in zip(leaves(output), leaves(joined), strict=True)])
    return map_leaves(lambda _: next(found), joined)
