"""A tape of all that a step does on one rank, with the addresses it did it on: what a CUDA graph is, without CUDA.

The step is an operator of torch after the other on the CPU, and messages of NCCL's simulator. As in a capture, nothing
of it stays done when it has been recorded: whatever it wrote to memory from before is put back. A replay runs the
operators again on the tensors of the recording, wherever the process keeps its values by then.

A graph knows addresses only. So the tape keeps no memory from before the step alive: a replay fails where it comes to
memory that has been freed, which a GPU would read or write whatever it is used for by then. And what the recording has
computed is nowhere: it is NaN until the first replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.gpu.recorder import EMPTY, READS, location
from patchpar.shard.graphs.recorder import CaptureRefused
from patchpar.shard.sdpa import dispatch_attention, replaced_attention
from tests.conformance.stand_in import SimulatedRank

Again = Callable[[], None]
NAN = 0xFF  # every byte of a number that is none, in all floating-point formats of torch


MASKED = {"index", "index_put", "index_put_"}
FROM_PYTHON = "lift_fresh"
"""The operator of torch.tensor."""


class MemoryIsFreedError(Exception):
    """A replay comes to memory from before the step that nobody has kept."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a tensor from before the step lies, whose memory this does not keep. `operator`: what comes to it.

    `number`: a copy of one without dims until the step has ended, and for good if it has ended with the step: that is a
    number of Python which torch passes as a tensor, as in `x[0] = 0.5`, and for a kernel an argument.
    """

    storage: StorageWeakRef
    dtype: torch.dtype
    layout: tuple[int, tuple[int, ...], tuple[int, ...]]
    operator: str
    number: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, x: Tensor, operator: str) -> Address:
        """Of a tensor of any shape."""
        layout, number = (x.storage_offset(), tuple(x.shape), x.stride()), [x.clone()] if x.ndim == 0 else []
        return cls(StorageWeakRef(x.untyped_storage()), x.dtype, layout, operator, number)

    def step_has_ended(self) -> None:
        """Keep no copy of a tensor that is still there."""
        if not self.storage.expired():
            self.number.clear()

    def tensor(self) -> Tensor:
        """Return what lies there. Raises MemoryIsFreedError."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # type: ignore[attr-defined]
        if storage is None and self.number:
            return self.number[0]
        if storage is None:
            what = f"a tensor {self.layout[1]} of {self.dtype} from before the step"
            raise MemoryIsFreedError(f"{self.operator} of a replay comes to {what}, which has been freed")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.layout)


class ReadsRefused(TorchFunctionMode):
    """Raises CaptureRefused for what reads values of a GPU too, and of the CPU without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            raise CaptureRefused(f"{func.__name__} reads values at {location()}")
        if func is dispatch_attention:
            with self:
                return replaced_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class OpTape(TorchDispatchMode):
    """Records what runs inside on this thread's rank. Raises CaptureRefused where the process reads a value."""

    fraction, untaken = 0.0, 1.0

    def __init__(self, rank: SimulatedRank) -> None:
        super().__init__()
        self._rank = rank
        self._again: list[Again] = []
        self._works: dict[int, list[Any]] = {}  # by the id of the work of the recording, which is kept in the list too
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # storages from before, as bytes, and copies of them
        self._addresses: list[Address] = []
        self._made: dict[int, Any] = {}  # storages that the step has allocated, kept so that none is at one's address
        self._sizes: dict[int, int] = {}  # their bytes, which remain a graph's where the step frees them
        self._frozen: dict[int, Any] = {}  # those of them that have values of Python
        self.output: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or _counts_values(name, args):
            raise CaptureRefused(f"{name} reads a value at {location()}")
        args, kwargs = tree_map(lambda x: x, (args, kwargs or {}))  # lists of its own
        if name == FROM_PYTHON:  # values are frozen, where the device does not refuse them
            self._made[args[0].untyped_storage()._cdata] = self._frozen[args[0].untyped_storage()._cdata] = args[0]
            return func(*args, **kwargs)
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in taken:
            self._touch(x)
        found = func(*args, **kwargs)
        here = {x.untyped_storage()._cdata for x in taken}
        new = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in here]
        for x in new:
            storage = x.untyped_storage()
            self._made[storage._cdata], self._sizes[storage._cdata] = x, storage.nbytes()
        if func._schema.is_mutable or (new and name not in EMPTY):
            call = self._as_addresses((args, kwargs), name)
            self._again.append(lambda: _written(new, found, _called(func, call)))
        return found

    def begins(self, args: Any, kwargs: Any) -> None:
        """Copy the buffers of messages or a collective that the step is about to begin: afterwards none is touched."""
        for x in (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
            self._touch(x)

    def begun(self, begin: Callable[..., Any], args: Any, kwargs: Any, work: Any) -> None:
        """Note messages or a collective of the simulator that the step has begun."""
        works = list(tree_leaves(work))
        slots = [self._works.setdefault(id(each), [each, None]) for each in works]
        where, call = self._rank.where, self._as_addresses((args, kwargs), self._rank.where)

        def again() -> None:
            self._rank.where = where
            for slot, each in zip(slots, tree_leaves(_called(begin, call)), strict=True):
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
            with self, ReadsRefused():
                self.output = step()
        finally:
            self._rank.tape = None
            for work, _ in self._works.values():
                work.wait()  # the simulator has sent them, as a capture would not
            for x, copy in self._before.values():
                x.copy_(copy)
            self._before.clear()
            for address in self._addresses:
                address.step_has_ended()
            for key in (key for key, x in self._made.items() if x.is_cpu and key not in self._frozen):
                storage = self._made[key].untyped_storage()
                storage.resize_(max(storage.nbytes(), self._sizes[key]))
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(NAN)

    def replay(self) -> None:
        """Run the step again."""
        for again in self._again:
            again()

    def _as_addresses(self, call: Any, operator: str) -> Any:
        """Return a call with addresses in the place of tensors, of any shape, from before the step."""

        def of(x: Any) -> Any:
            is_plain = type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and x.untyped_storage().nbytes() > 0
            if not is_plain or x.untyped_storage()._cdata in self._made:
                return x
            self._addresses.append(Address.of(x, operator))
            return self._addresses[-1]

        return tree_map(of, call)

    def _touch(self, x: Tensor) -> None:
        """Copy the storage of `x`, of any shape, if it is from before the step and the step comes to it."""
        storage = x.untyped_storage()
        if x.is_cpu and storage._cdata not in self._made and storage._cdata not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage._cdata] = whole, whole.clone()


def _counts_values(name: str, args: Any) -> bool:
    """Whether an operator reads a mask, by which its result has a size, or places that it writes to.

    One number in the place of all is written without.
    """
    if name not in MASKED or (name.startswith("index_put") and args[2].numel() == 1):
        return name == "masked_select"
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _called(function: Callable[..., Any], call: Any) -> Any:
    """Call a function with what lies at the addresses of a call by now."""
    args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, Address) else x, call)
    return function(*args, **kwargs)


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
