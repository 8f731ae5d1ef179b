"""Whether anything reads what is still being received, or writes what is still being sent, on one rank."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conformance.nccl import Buffer

VIEWS = {"detach", "alias", "_reshape_alias", "view", "_unsafe_view"}
MAIN = "main"


@dataclass(eq=False)
class Region:
    """Memory of an operation. `streams`: those that have waited for it."""

    buffer: Buffer
    is_received: bool
    streams: set[str] = field(default_factory=set)


class BufferGuard(TorchDispatchMode):
    """Looks at every operation of torch in the thread of one rank. `stream`: the current one of its device."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__()
        self.faults, self.stream = faults, MAIN
        self._regions: dict[int, list[Region]] = defaultdict(list)  # by storage

    def started(self, buffers: Sequence[Buffer], *, received: bool) -> list[Region]:
        """Note buffers of an operation."""
        found = [Region(buffer, received) for buffer in buffers if buffer.num_bytes]
        for region in found:
            self._regions[region.buffer.key].append(region)
        return found

    def waited(self, regions: Sequence[Region]) -> None:
        """Note that the current stream has waited for an operation."""
        for region in regions:
            region.streams.add(self.stream)
            if not region.is_received and region in self._regions[region.buffer.key]:
                self._regions[region.buffer.key].remove(region)  # it may be written from now on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._regions and not (func.is_view or func.overloadpacket.__name__ in VIEWS):
            for index, argument in enumerate(func._schema.arguments):
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for x in tree_leaves(value):
                    if isinstance(x, Tensor):
                        self._look_at(func, x, writes=writes)
        return func(*args, **kwargs)

    def _look_at(self, func: Any, x: Tensor, *, writes: bool) -> None:
        for region in self._touched(x):
            if region.is_received and self.stream not in region.streams:
                what = "being received" if not region.streams else f"received on {sorted(region.streams)}"
                self.faults.append(f"{func} on stream {self.stream} uses a buffer {what} at {_position()}")
            elif writes and not region.is_received:
                self.faults.append(f"{func} writes to a buffer being sent at {_position()}")

    def _touched(self, x: Tensor) -> Iterator[Region]:
        if not x.numel() or x.device.type != "cpu":
            return
        regions = self._regions.get(x.untyped_storage().data_ptr())
        if not regions:
            return
        regions[:] = [region for region in regions if not region.buffer.is_freed]
        start, end = x.data_ptr(), x.data_ptr() + _extent(x)
        yield from [r for r in regions if r.buffer.start < end and start < r.buffer.start + r.buffer.num_bytes]


def _extent(x: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize


def _position() -> str:
    """Where in the package this is called from."""
    frames = [frame for frame in traceback.extract_stack(limit=40) if "/patchpar/" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "a test"
