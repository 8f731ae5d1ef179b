"""A tape of all that a step does on one rank, with the addresses it did it on: what a CUDA graph is, without CUDA.

The step is an operator of torch after the other on the CPU, and messages of NCCL's simulator. As in a capture, nothing
of it stays done when it has been recorded: whatever it wrote to memory from before is put back. A replay runs the
operators again on the tensors of the recording, wherever the process keeps its values by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.gpu.recorder import EMPTY, READS, location
from patchpar.shard.graphs.recorder import CaptureRefused
from tests.conformance.stand_in import SimulatedRank

Again = Callable[[], None]


class OpTape(TorchDispatchMode):
    """Records what runs inside on this thread's rank. Raises CaptureRefused where the process reads a value."""

    fraction, untaken = 0.0, 1.0

    def __init__(self, rank: SimulatedRank) -> None:
        super().__init__()
        self._rank = rank
        self._again: list[Again] = []
        self._works: dict[int, list[Any]] = {}  # by the id of the work of the recording, which is kept in the list too
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # storages from before, as bytes, and copies of them
        self._made: dict[int, Any] = {}  # storages that the step has allocated, kept so that none is at one's address
        self.output: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            raise CaptureRefused(f"{name} reads a value at {location()}")
        args, kwargs = tree_map(lambda x: x, (args, kwargs or {}))  # lists of its own
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in taken:
            self._touch(x)
        found = func(*args, **kwargs)
        here = {x.untyped_storage()._cdata for x in taken}
        new = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in here]
        for x in new:
            self._made[x.untyped_storage()._cdata] = x
        if func._schema.is_mutable or (new and name not in EMPTY):
            self._again.append(lambda: _written(new, found, func(*args, **kwargs)))
        return found

    def begins(self, args: Any, kwargs: Any) -> None:
        """Copy the buffers of messages or a collective that the step is about to begin: afterwards none is touched."""
        for x in (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
            self._touch(x)

    def begun(self, begin: Callable[..., Any], args: Any, kwargs: Any, work: Any) -> None:
        """Note messages or a collective of the simulator that the step has begun."""
        works = list(tree_leaves(work))
        slots = [self._works.setdefault(id(each), [each, None]) for each in works]
        where = self._rank.where

        def again() -> None:
            self._rank.where = where
            for slot, each in zip(slots, tree_leaves(begin(*args, **kwargs)), strict=True):
                slot[1] = each

        self._again.append(again)

    def waited(self, work: Any) -> None:
        """Note that the step has waited for what it has begun. Raises CaptureRefused for what a step before began."""
        if id(work) not in self._works:
            raise CaptureRefused("the step waits for messages of the step before")
        slot = self._works[id(work)]
        self._again.append(lambda: slot[1].wait())

    def record(self, step: Callable[[], Any]) -> None:
        """Record a step. The memory of before has its values of before afterwards."""
        self._rank.tape = self
        try:
            with self:
                self.output = step()
        finally:
            self._rank.tape = None
            for x, copy in self._before.values():
                x.copy_(copy)

    def replay(self) -> None:
        """Run the step again."""
        for again in self._again:
            again()

    def _touch(self, x: Tensor) -> None:
        """Copy the storage of `x`, of any shape, if it is from before the step and the step comes to it."""
        storage = x.untyped_storage()
        if storage._cdata not in self._made and storage._cdata not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage._cdata] = whole, whole.clone()


def _written(new: Sequence[Tensor], found: Any, again: Any) -> None:
    """Write what an operator returns now to the tensors that it returned in the recording."""
    wanted = {id(x) for x in new}
    for x, value in zip(tree_leaves(found), tree_leaves(again), strict=True):
        if id(x) in wanted:
            x.copy_(value)


class TapeRecorder:
    """Takes the place of `GraphRecorder` on a rank of the simulator. `tapes`: all that have been recorded."""

    def __init__(self, rank: SimulatedRank) -> None:
        self._rank, self.tapes = rank, list[OpTape]()

    def capture(self, step: Callable[[], Any], what: str) -> OpTape:
        """See `patchpar.shard.graphs.recorder.StepRecorder`."""
        tape = OpTape(self._rank)
        tape.record(step)
        self.tapes.append(tape)
        return tape
