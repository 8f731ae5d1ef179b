"""Shared memory that one rank writes and its peers read: segments of anonymous memory, passed as file descriptors.

A segment has no name, so nothing is left behind however a process ends. Space is allocated upwards; a segment whose
messages have all been read is used again from offset 0. When none has room, a larger segment is added.
"""

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from patchpar.launch.anonymous_file import aligned, anonymous_file

FIRST_SEGMENT = 4 << 20


def map_segment(descriptor: int) -> Tensor:
    """Return a uint8 tensor [bytes] over the memory of the file `descriptor`."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)


@dataclass(slots=True)
class Segment:
    """One piece of shared memory [bytes]. `unread` counts receivers that have not read their message yet."""

    number: int
    descriptor: int
    memory: Tensor
    used: int = 0
    unread: int = 0


class Arena:
    """This rank's outgoing shared memory."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def take(self, num_bytes: int) -> tuple[Segment, int]:
        """Allocate one message; return its segment and the offset there."""
        for segment in self.segments:
            if segment.unread == 0:
                segment.used = 0
            if segment.used + num_bytes <= segment.memory.numel():
                break
        else:
            segment = self._grow(num_bytes)
        offset, segment.used = segment.used, segment.used + aligned(num_bytes)
        return segment, offset

    def _grow(self, num_bytes: int) -> Segment:
        largest = self.segments[-1].memory.numel() if self.segments else FIRST_SEGMENT // 2
        descriptor = _anonymous_memory(max(2 * largest, aligned(num_bytes)))
        self.segments.append(Segment(len(self.segments), descriptor, map_segment(descriptor)))
        return self.segments[-1]

    def close(self) -> None:
        """Close the descriptors of this rank; the memory is freed when the last reader unmaps it."""
        for segment in self.segments:
            os.close(segment.descriptor)
        self.segments.clear()


def _anonymous_memory(num_bytes: int) -> int:
    descriptor = anonymous_file("patchpar")
    os.ftruncate(descriptor, num_bytes)
    return descriptor
