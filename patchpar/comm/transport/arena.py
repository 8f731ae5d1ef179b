"""Shared memory that one rank writes and its peers read: segments of anonymous memory, passed as file descriptors.

A segment has no name, so nothing is left behind however a process ends. Space is allocated upwards; a segment whose
messages have all been read is used again from offset 0. When none has room, a larger segment is added. Memory of this
rank that keeps its values, such as shards of weights, can be a segment too: what lies in it is sent without a copy.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from patchpar.launch.anonymous_file import aligned, anonymous_file

FIRST_SEGMENT = 4 << 20


def map_segment(descriptor: int, *, own_writes: bool = False) -> Tensor:
    """Return a uint8 tensor [bytes] over the memory of the file `descriptor`.

    `own_writes`: what is written to it stays in this process, which has a copy of the page from then on.
    """
    access = mmap.ACCESS_COPY if own_writes else mmap.ACCESS_WRITE
    return torch.frombuffer(mmap.mmap(descriptor, 0, access=access), dtype=torch.uint8)


@dataclass(slots=True)
class Segment:
    """One piece of shared memory [bytes]. `unread` counts receivers that have not read their message yet.

    `is_kept`: its bytes are values of this rank, so that no message is written to it.
    """

    number: int
    descriptor: int
    memory: Tensor
    used: int = 0
    unread: int = 0
    is_kept: bool = False


Position = tuple[Segment, int, int]
"""Of a message: its segment, the offset there, and its bytes without what aligns the tensors."""


class Arena:
    """This rank's outgoing shared memory."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}  # by number; those that are kept, and messages' from the smallest on
        self._numbers = count()

    def take(self, num_bytes: int) -> tuple[Segment, int]:
        """Allocate one message; return its segment and the offset there."""
        for segment in self.segments.values():
            if segment.is_kept:
                continue
            if segment.unread == 0:
                segment.used = 0
            if segment.used + num_bytes <= segment.memory.numel():
                break
        else:
            segment = self._grow(num_bytes)
        offset, segment.used = segment.used, segment.used + aligned(num_bytes)
        return segment, offset

    def _grow(self, num_bytes: int) -> Segment:
        sizes = [segment.memory.numel() for segment in self.segments.values() if not segment.is_kept]
        descriptor, memory = _anonymous_memory(max(2 * max(sizes, default=FIRST_SEGMENT // 2), aligned(num_bytes)))
        return self._add(descriptor, memory, is_kept=False)

    def _add(self, descriptor: int, memory: Tensor, *, is_kept: bool) -> Segment:
        number = next(self._numbers)
        self.segments[number] = Segment(number, descriptor, memory, is_kept=is_kept)
        return self.segments[number]

    def keep(self, descriptor: int, memory: Tensor) -> None:
        """Add the `memory` [bytes] of a file as a segment. Its descriptor is duplicated."""
        self._add(os.dup(descriptor), memory, is_kept=True)

    def drop(self, memory: Tensor) -> int | None:
        """Remove the segment of `memory` [bytes] that was kept, and return its number; None if there is none."""
        for number, segment in self.segments.items():
            if segment.is_kept and segment.memory.data_ptr() == memory.data_ptr():
                os.close(self.segments.pop(number).descriptor)
                return number
        return None

    def kept_at(self, tensors: Sequence[Tensor]) -> Position | None:
        """Return where a message of these tensors lies if it is one that is kept, so that peers can read it there."""
        if len(tensors) != 1 or not tensors[0].is_contiguous():
            return None
        start, num_bytes = tensors[0].data_ptr(), tensors[0].numel() * tensors[0].element_size()
        for segment in self.segments.values():
            if segment.is_kept:
                offset = start - segment.memory.data_ptr()
                if offset >= 0 and offset + num_bytes <= segment.memory.numel():
                    return segment, offset, num_bytes
        return None

    def copied(self, tensors: Sequence[Tensor]) -> Position:
        """Return where a message of these tensors has been copied to."""
        segment, offset = self.take(sum(aligned(x.numel() * x.element_size()) for x in tensors))
        at, total = offset, 0
        for x in tensors:
            num_bytes = x.numel() * x.element_size()
            segment.memory[at : at + num_bytes].view(x.dtype).view(x.shape).copy_(x.detach())
            at, total = at + aligned(num_bytes), total + num_bytes
        return segment, offset, total

    def free(self, number: int, messages: int) -> None:
        """Note that so many messages in a segment, which may have been dropped, have been read or will never be."""
        if number in self.segments:
            self.segments[number].unread -= messages

    def close(self) -> None:
        """Close the descriptors of this rank; the memory is freed when the last reader unmaps it."""
        for segment in self.segments.values():
            os.close(segment.descriptor)
        self.segments.clear()


def _anonymous_memory(num_bytes: int) -> tuple[int, Tensor]:
    """Return a new file and its memory [bytes]. Raises OSError, with the file closed."""
    descriptor = anonymous_file("patchpar")
    try:
        os.ftruncate(descriptor, num_bytes)
        return descriptor, map_segment(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
