"""The tensors of one message in one flat buffer, so that a message is one operation of the backend.

    one dtype         elements of that dtype, one tensor after the other
    several dtypes    bytes, every tensor aligned, so that it can be read as a view of its own dtype

A single tensor is its own buffer. Both sides derive the layout from the same specs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from patchpar.comm.transport.message import TensorSpec

ALIGNMENT = 16  # bytes: the widest load of a GPU
LAYOUTS_KEPT = 4096  # messages of different shapes that a model may have


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Where tensors of `specs` lie in a buffer of `size` elements of `dtype`. `offsets`: their first elements."""

    specs: tuple[TensorSpec, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    size: int

    def empty(self, device: torch.device) -> Tensor:
        """Return a buffer [size] without values."""
        return torch.empty(self.size, dtype=self.dtype, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors, of any shape, that lie in `buffer` [size]."""
        found = []
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            part = buffer.narrow(0, offset, spec.num_bytes // self.dtype.itemsize)
            found.append((part if spec.dtype == self.dtype else part.view(spec.dtype)).view(spec.shape))
        return found


@lru_cache(maxsize=LAYOUTS_KEPT)
def layout_of(specs: tuple[TensorSpec, ...]) -> MessageLayout:
    """Return the layout of a message with tensors of `specs`."""
    several = len({spec.dtype for spec in specs}) > 1
    dtype = torch.uint8 if several or not specs else specs[0].dtype
    offsets, end = [], 0
    for spec in specs:
        start = -(-end // ALIGNMENT) * ALIGNMENT if several else end
        offsets.append(start)
        end = start + (spec.num_bytes if several else prod(spec.shape))
    return MessageLayout(specs, dtype, tuple(offsets), end)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return a buffer [size] with `tensors`, of any shape, as `layout_of` their specs lays them out.

    A single contiguous tensor is not copied.
    """
    flat = [x.detach().reshape(-1) for x in tensors]
    if len(flat) == 1:
        return flat[0]
    layout = layout_of(tuple(map(TensorSpec.of, tensors)))
    if all(x.dtype == layout.dtype for x in flat):
        return torch.cat(flat)
    parts, end = [], 0
    for x, offset in zip(flat, layout.offsets, strict=True):
        if offset > end:
            parts.append(x.new_empty(offset - end, dtype=torch.uint8))
        parts.append(x.view(torch.uint8))
        end = offset + parts[-1].numel()
    return torch.cat(parts)
