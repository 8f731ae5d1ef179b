"""Where a network can be cut into stages, found without values: by which blocks' answers each block reads.

Real ranks let blocks before a cut answer NaN and look for it in the output (`CutSearch`). Here one run of the network
on the meta device notes, for each storage, the block calls whose answers it was computed from outside of blocks. A cut
is right if no block after it, and no part of the output, reads the answer of a block before it that is not carried
over. What a block leaves behind beside its answer, in an argument or an attribute, cannot be carried.
"""

import weakref
from collections.abc import Collection, Sequence, Set
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from patchpar.comm.pytree import tensors_in
from patchpar.models.dry_run.result_form import tensors_of
from patchpar.shard.stages.block_hooks import Run
from patchpar.shard.stages.search import CutSearch

LIKE = frozenset({"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros"})
"""Operators whose result has the form of their argument, and nothing of its values."""
FORMS = LIKE | {"new_ones", "new_full", "fill_", "zero_"}
OUTSIDE = -1
Sources = frozenset[int]


class CutsWithoutValues(CutSearch):
    """See CutSearch."""

    _reads: "BlockReads | None" = None

    def _is_right(self, cut: int, carried: Collection[int]) -> bool:
        """Whether the output is that of the whole run if only answers in `carried` reach what is after the cut."""
        if self._reads is None:
            self._reads = BlockReads()
            with self._reads:
                self._reads.end(self._plain(self._noted))
        missing = {number for number in range(self.first, cut) if number not in carried}
        left = {left_by(number) for number in range(self.first, cut)}
        return not any(each & (missing | left) for each in self._reads.after(cut))

    def _noted(self, number: int, path: str, run: Run) -> Any:
        assert self._reads is not None
        form = self.calls[number].form
        self._reads.begin(number)
        answer = form.received(form.sent(run()))  # copies: a block may return what it was given
        self._reads.answered(number, tensors_in(answer))
        return answer


def left_by(number: int) -> int:
    """Return what stands, among sources, for tensors that a block call makes beside its answer."""
    return -2 - number


class BlockReads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is not typed
    """Notes what the block calls of a run read: numbers of calls whose answers they are, or see `left_by`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, Sources] = {}  # by id of a storage
        self._reads: list[set[int]] = []
        self._inside = OUTSIDE
        self._output: Sources = frozenset()

    def begin(self, number: int) -> None:
        """Begin a block call."""
        self._inside = number
        self._reads.append(set())

    def answered(self, number: int, answer: Sequence[Tensor]) -> None:
        """End a block call, with tensors of any shape."""
        self._reads[number].discard(left_by(number))
        self._inside = OUTSIDE
        for x in answer:
            self._note(x, frozenset({number}))

    def end(self, output: Any) -> None:
        """End the run."""
        self._output = frozenset().union(*(self._sources_of(x) for x in tensors_in(output)))

    def after(self, cut: int) -> list[Set[int]]:
        """Return what the block calls from number `cut` on read, and what the output was computed from."""
        return [*self._reads[cut:], self._output]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch: nothing is compiled inside."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or func.overloadpacket.__name__ in FORMS:
            return result
        given = tensors_of((*args, *kwargs.values()))
        read = frozenset[int]().union(*map(self._sources_of, given))
        if self._inside != OUTSIDE:
            self._reads[self._inside] |= read
            read = frozenset({left_by(self._inside)})
        written = tensors_of(args[:1]) if func._schema.is_mutable else []
        for x in (*tensors_of(result), *written):
            self._note(x, read | self._sources_of(x) if func._schema.is_mutable else read)
        return result

    def _sources_of(self, x: Tensor) -> Sources:
        return self._sources.get(id(x.untyped_storage()), frozenset())

    def _note(self, x: Tensor, sources: Sources) -> None:
        storage = x.untyped_storage()
        if id(storage) not in self._sources:
            weakref.finalize(storage, self._sources.pop, id(storage), None)
        self._sources[id(storage)] = sources
