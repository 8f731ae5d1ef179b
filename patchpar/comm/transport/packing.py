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

from patchpar.comm.kernels.pack_tensors import pack_tensors
from patchpar.comm.transport.message import TensorSpec
from patchpar.comm.transport.message_memory import MessageMemory, buffer_for

ALIGNMENT = 16  # bytes: the widest load of a GPU
LAYOUTS_KEPT = 4096  # messages of different shapes that a model may have
MOST_PADDING = 1.5  # of the elements that are gathered: where shares differ by more, they are sent as messages


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Where tensors of `specs` lie in a buffer of `size` elements of `dtype`. `offsets`: their first elements."""

    specs: tuple[TensorSpec, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    size: int

    @property
    def pieces(self) -> tuple[int, ...]:
        """What `pack_tensors` writes: number and first element of each tensor."""
        return tuple(number for piece in enumerate(self.offsets) for number in piece)

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


def packed(
    tensors: Sequence[Tensor],
    pieces: tuple[int, ...],
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    memory: MessageMemory | None,
) -> Tensor:
    """Return a buffer [size] of `dtype` with `tensors`, of any shape, at `pieces`, see `pack_tensors`.

    What a single contiguous tensor fills is that tensor, unless `memory` has the buffer.
    """
    if memory is None and pieces == (0, 0) and tensors[0].numel() == size and tensors[0].dtype == dtype:
        return tensors[0].detach().reshape(-1).contiguous()  # of one column of a map, one dim is a view with gaps
    buffer = buffer_for(memory, "sent", size, dtype, device)
    if tensors:
        pack_tensors(buffer, tensors, pieces)
    if memory is not None:
        placed = zip(pieces[::2], pieces[1::2], strict=True)
        memory.hold_sent(buffer, {id(tensors[number]): start * dtype.itemsize for number, start in placed})
    return buffer


def pack(tensors: Sequence[Tensor], size: int | None = None, memory: MessageMemory | None = None) -> Tensor:
    """Return a buffer [size] with `tensors`, of any shape, as `layout_of` their specs lays them out.

    `size` may be larger than the layout's; the rest has no values. A single contiguous tensor is not copied, unless to
    `memory`, which then has the buffer.
    """
    layout = layout_of(tuple(map(TensorSpec.of, tensors)))
    size = layout.size if size is None else size
    return packed(tensors, layout.pieces, size, layout.dtype, tensors[0].device, memory)


def offset_of(x: Tensor) -> tuple[int, int]:
    """Return where `x`, of any shape, begins: its storage, and the byte there. Fake tensors have no address."""
    return x.untyped_storage()._cdata, int(x.storage_offset()) * x.element_size()


def adjacent_rows(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors of any shape that lie one after the other as one [parts, elements]; None if they do not."""
    first, size = parts[0], parts[0].numel()
    storage, start = offset_of(first)
    for index, x in enumerate(parts):
        alike = x.is_contiguous() and x.dtype == first.dtype and x.numel() == size
        if not alike or offset_of(x) != (storage, start + index * size * first.element_size()):
            return None
    return first.detach().as_strided((len(parts), size), (size, 1))


def gather_buffers(
    own: Sequence[Tensor], others: Sequence[tuple[TensorSpec, ...]], memory: MessageMemory | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return `own`, tensors of any shape, as [elements], and a buffer [ranks, elements] for those of all ranks.

    `others`: what the other ranks send. All rows are as long as the longest, of several dtypes aligned. None where a
    gather of equal rows would send much more than there is; all ranks find the same. `memory`: has the buffers, if
    given.
    """
    layouts = [layout_of(tuple(map(TensorSpec.of, own))), *map(layout_of, others)]
    sizes = [layout.size for layout in layouts]
    width = max(sizes)
    if len({layout.dtype for layout in layouts}) > 1 or width * len(sizes) > MOST_PADDING * sum(sizes):
        return None
    if len({x.dtype for x in own}) > 1:
        width = -(-width // ALIGNMENT) * ALIGNMENT  # or tensors of the next row would not lie as their dtypes need
    packed = pack(own, width, memory)
    rows = buffer_for(memory, "received", len(sizes) * width, packed.dtype, packed.device)
    return packed, rows.view(len(sizes), width)


@dataclass(frozen=True, slots=True)
class MessageRow:
    """Several messages one after the other in a buffer of `size` bytes, each aligned. `starts`: their first bytes."""

    layouts: tuple[MessageLayout, ...]
    starts: tuple[int, ...]
    size: int

    @property
    def sizes(self) -> list[int]:
        """Bytes of each message, with what aligns the next."""
        ends = (*self.starts[1:], self.size)
        return [end - start for start, end in zip(self.starts, ends, strict=True)]

    def buffers(self, row: Tensor) -> list[Tensor]:
        """Return the buffer [elements] of each message out of `row` [bytes]."""
        found = []
        for layout, start in zip(self.layouts, self.starts, strict=True):
            part = row.narrow(0, start, layout.size * layout.dtype.itemsize)
            found.append(part if layout.dtype == torch.uint8 else part.view(layout.dtype))
        return found


@lru_cache(maxsize=LAYOUTS_KEPT)
def row_of(messages: tuple[tuple[TensorSpec, ...], ...]) -> MessageRow:
    """Return where messages with tensors of these specs lie, some of which may be empty."""
    layouts = tuple(map(layout_of, messages))
    starts, end = [], 0
    for layout in layouts:
        starts.append(end)
        end += -(-layout.size * layout.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return MessageRow(layouts, tuple(starts), end)


def pack_row(
    messages: Sequence[Sequence[Tensor]], device: torch.device, memory: MessageMemory | None = None
) -> tuple[Tensor, MessageRow]:
    """Return a buffer [bytes] on `device` with the tensors of `messages`, of any shape, and where they lie.

    `memory`: has the buffer, if given.
    """
    row = row_of(tuple(tuple(map(TensorSpec.of, tensors)) for tensors in messages))
    given = {id(x): x for tensors in messages for x in tensors}  # a tensor to several ranks: once
    numbers = {key: number for number, key in enumerate(given)}
    dtypes = {x.dtype for x in given.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    pieces = list[int]()
    for tensors, layout, start in zip(messages, row.layouts, row.starts, strict=True):
        for x, offset in zip(tensors, layout.offsets, strict=True):
            pieces += (numbers[id(x)], (start + offset * layout.dtype.itemsize) // dtype.itemsize)
    size = row.size // dtype.itemsize
    return packed(list(given.values()), tuple(pieces), size, dtype, device, memory).view(torch.uint8), row
