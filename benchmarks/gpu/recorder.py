"""What a call does on a fake GPU with a fake NCCL: kernel launches, messages, synchronisations and memory.

Under fake tensors nothing can be read from the device unnoticed: what would wait for it is counted with its place in
the code, and gets a made-up value.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
NO_KERNEL = EMPTY | {"_unsafe_view", "lift_fresh", "_local_scalar_dense", "set_", "resize_", "_linalg_check_errors"}
KERNELS = {"native_group_norm": 3, "convolution": 2, "_linalg_solve_ex": 8, "nonzero": 4}
"""Kernels of operators that launch several: moments, their combination and the affine; a product and its bias."""
READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_linalg_check_errors"}
"""Operators whose result the process needs, so that it waits for the device."""
COPIES = {"_to_copy", "copy_"}


class Work(NamedTuple):
    """What one kernel computes, and reads and writes if nothing stays in a cache."""

    flops: int
    num_bytes: int


@dataclass(slots=True)
class CallCounts:
    """What one call of a denoiser does on one rank.

    `launches` of kernels, `operations` (messages and collectives) and `bytes_out` are by name of operator; `syncs`, in
    which the process waits for the device, and `copies` between device and host by their place in the code. `polls` ask
    whether an event or a message has ended. `peak` and `held`: bytes of the device during and after the call, without
    those that were there before the first. `work` has the kernels. `booked` and `rounds`: bytes sent and exchanges by
    kind, as patchpar's communicator counts them.
    """

    launches: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    bytes_out: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    groups: int = 0
    events: int = 0
    polls: int = 0
    allocations: int = 0
    peak: int = 0
    held: int = 0
    work: Counter[Work] = field(default_factory=Counter)
    booked: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)


class Watcher(TorchDispatchMode):
    """Notes the storages of what is run inside in `memory`, and makes up values that are read; counts nothing."""

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS and any(isinstance(x, FakeTensor) for x in args):
            return made_up(name, args)
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in tree_leaves(found):
                if _is_on_device(x):
                    self.memory.see(x)
        return found


class Recorder(TorchDispatchMode):
    """Counts what is run inside. `memory` is shared by the calls of one denoiser."""

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self.counts, self.memory = CallCounts(), memory

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._send(func, args)
            return func(*args, **kwargs)
        on_device = any(_is_on_device(x) for x in tree_leaves((args, kwargs)))
        name = func.overloadpacket.__name__
        if on_device and name in READS:
            self.counts.syncs[f"{name} at {location()}"] += 1
            self._launch(name, args)
            return self._seen(made_up(name, args))
        if name in READS and any(isinstance(x, FakeTensor) for x in tree_leaves(args)):  # a copy on the host
            return made_up(name, args)
        if name in COPIES:
            self._copy(name, args, kwargs)
        found = func(*args, **kwargs)
        if func.namespace != "prim" and not func.is_view and (on_device or any(map(_is_on_device, tree_leaves(found)))):
            self._launch(name, args)
            self.counts.work[work_of(func, args, kwargs, found)] += name not in NO_KERNEL
        return self._seen(found)

    def _seen(self, found: Any) -> Any:
        for x in tree_leaves(found):
            if _is_on_device(x):
                self.counts.allocations += self.memory.see(x)
        return found

    def _launch(self, name: str, args: Sequence[Any]) -> None:
        if name in NO_KERNEL:
            return
        number = KERNELS.get(name, 1)
        if name == "native_group_norm" and args[1] is None:  # no affine
            number -= 1
        self.counts.launches[name] += number

    def _copy(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Count a copy between device and host, which waits unless it is told not to."""
        source = args[0] if name == "_to_copy" else args[1]
        target = kwargs.get("device") or args[0].device
        if not isinstance(source, Tensor) or torch.device(target).type == source.device.type:
            return
        where = f"{source.device.type} to {torch.device(target).type} at {location()}"
        self.counts.copies[where] += 1
        blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if blocks:
            self.counts.syncs[f"copy from {where}"] += 1

    def _send(self, func: Any, args: Sequence[Any]) -> None:
        name = func.overloadpacket.__name__
        self.counts.operations[name] += 1
        self.counts.bytes_out[name] += _bytes_out(name, args)


class LiveMemory:
    """Storages of the device that are in use, without those of `before`, tensors of any shape that were there."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        self._before = {x.untyped_storage()._cdata for x in before}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._upper = 0  # of live bytes: storages that are gone are found only where this would be a new peak
        self.peak = 0

    def see(self, x: Tensor) -> bool:
        """Note the storage of `x`, of any shape; return whether it is new, or has become larger."""
        storage = x.untyped_storage()
        if storage._cdata in self._before:
            return False
        known = self._storages.get(storage._cdata)
        if known is not None and not known[0].expired() and storage.nbytes() <= known[1]:
            return False
        if known is not None:
            self._upper -= known[1]
        self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._upper += storage.nbytes()
        if self._upper > self.peak:
            self.peak = max(self.peak, self.live())
        return True

    def live(self) -> int:
        """Return the bytes of storages that are still in use, in their sizes of now."""
        found = {key: (ref, _size_of(ref)) for key, (ref, _) in self._storages.items()}
        self._storages = {key: (ref, size) for key, (ref, size) in found.items() if size is not None}
        self._upper = sum(size for _, size in self._storages.values())
        return self._upper

    def begin(self) -> None:
        """Forget the peak."""
        self.peak = self.live()


def _size_of(ref: StorageWeakRef) -> int | None:
    """Return the bytes that a storage has now; None for one that is gone."""
    if ref.expired():
        return None
    storage: Any = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return None if storage is None else storage.nbytes()


def _is_on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type not in ("cpu", "meta")


def _bytes_out(name: str, args: Sequence[Any]) -> int:
    """Return what this rank sends to others in one operator of the namespace c10d."""
    if name in ("recv_", "recv_any_source_", "barrier"):
        return 0
    if name == "send":
        return _num_bytes(args[0])
    group = next(dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
    size = group.size()
    if name == "alltoall_base_":
        parts = args[4] or [args[1].shape[0] // size] * size
        return _num_bytes(args[1]) * (sum(parts) - parts[group.rank()]) // max(1, sum(parts))
    if name in ("allgather_", "_allgather_base_"):
        return (size - 1) * _num_bytes(args[1])
    if name == "broadcast_":
        return (size - 1) * _num_bytes(args[0])
    raise NotImplementedError(f"bytes of the collective {name}: add it to _bytes_out")


def _num_bytes(tree: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(tree) if isinstance(x, Tensor))


def made_up(name: str, args: Sequence[Any]) -> Any:
    """A value for what would have been read: one, true, everywhere."""
    if name == "_local_scalar_dense":
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
    if name == "nonzero":
        return args[0].new_zeros((args[0].numel(), args[0].ndim), dtype=torch.int64)
    return None if name == "_linalg_check_errors" else True


def work_of(func: Any, args: Any, kwargs: Any, found: Any) -> Work:
    """Return what a kernel computes and moves. FLOPs are those of matrix products, by torch's own formulas."""
    count = flop_registry.get(func.overloadpacket)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=found))
    tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)]
    return Work(flops, sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors))


def location() -> str:
    """Return file and line of the innermost caller in patchpar, else in diffusers."""
    frames = list(_frames())
    for package in ("/patchpar/", "/diffusers/"):
        for file, line in frames:
            if package in file:
                return f"{package.strip('/')}/{file.rpartition(package)[2]}:{line}"
    return "code of neither patchpar nor diffusers"


def _frames() -> Iterator[tuple[str, int]]:
    for frame, line in traceback.walk_stack(None):
        yield frame.f_code.co_filename, line
