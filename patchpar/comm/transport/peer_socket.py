"""The socket between two ranks of one host: notifications of messages, and of memory that may be used again."""

import errno
import os
import socket
import struct
from collections import Counter, deque
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.transport.arena import Arena, Segment, map_segment
from patchpar.errors import ExchangeError
from patchpar.launch.descriptors import receive_with_descriptors

FRAME = struct.Struct("<B?xxIqq")  # kind, whether the segment is kept, segment, offset, bytes
MESSAGE, NEW_SEGMENT, DONE, DROPPED = 1, 2, 3, 4
"""NEW_SEGMENT: a message with the descriptor of a segment new to the peer. DROPPED: no message will be in it again."""


class ArrivedMessage(NamedTuple):
    """A message that can be read: `num_bytes` from `offset` of the sender's segment, `memory` [bytes] here.

    `is_kept`: the values stay there, so that the sender need not know that they have been read.
    """

    segment: int
    memory: Tensor
    offset: int
    num_bytes: int
    is_kept: bool = False


class OutgoingFrame(NamedTuple):
    """What is sent through the socket for a message: bytes, and a descriptor with the first of them."""

    data: memoryview
    descriptor: int | None = None


class PeerSocket:
    """The socket to one peer, and the frames received through it."""

    def __init__(self, peer: int, link: socket.socket) -> None:
        self.peer, self.link = peer, link
        link.setblocking(False)
        self.arrived: dict[int, ArrivedMessage] = {}  # by number, until fetched
        self.num_arrived = 0  # messages so far
        self.expected = 0  # messages that have a number
        self.unwanted: deque[int] = deque()  # numbers of those that nobody waits for any more
        self.known: set[int] = set()  # our segments that the peer has mapped
        self.unread: Counter[int] = Counter()  # messages to the peer in each of our segments
        self.mapped: dict[int, Tensor] = {}  # the peer's segments here
        self.closed = False
        self.moved = 0  # bytes of messages that have come through the socket itself
        self._rest = b""
        self._descriptors: list[int] = []

    def read(self, arena: Arena) -> bool:
        """Read the frames that have arrived; return whether there were any.

        Raises ExchangeError if this process can have no further descriptor or memory for a message.
        """
        if self.closed:
            return False
        try:
            data = self._received()
        except BlockingIOError:
            return False
        self.closed = not data
        data = self._rest + data
        whole = len(data) // FRAME.size * FRAME.size
        self._rest = data[whole:]
        for kind, is_kept, segment, offset, num_bytes in FRAME.iter_unpack(data[:whole]):
            if kind == DONE:
                arena.free(segment, 1)
                self.unread[segment] -= 1
                continue
            if kind == DROPPED:  # messages in it that have arrived keep the memory
                del self.mapped[segment]
                continue
            if kind == NEW_SEGMENT:
                self.mapped[segment] = self._next_segment()
            self.arrived[self.num_arrived] = ArrivedMessage(segment, self.mapped[segment], offset, num_bytes, is_kept)
            self.num_arrived += 1
        return True

    def _received(self) -> bytes:
        """Return what has come; nothing once the connection has ended. Raises BlockingIOError, ExchangeError."""
        try:
            data, descriptors = receive_with_descriptors(self.link, 4096, 16)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno != errno.EMFILE:
                return b""
            raise self._unread(error) from error
        self._descriptors += descriptors
        return data

    def _next_segment(self) -> Tensor:
        """Return the memory [bytes] of the next descriptor. Raises ExchangeError."""
        descriptor = self._descriptors.pop(0)
        try:
            return map_segment(descriptor)
        except OSError as error:
            raise self._unread(error) from error
        finally:
            os.close(descriptor)

    def _unread(self, error: OSError) -> ExchangeError:
        """Return the error for a message that cannot be read; those behind it would be taken for it."""
        self.closed = True
        return ExchangeError(f"a message of rank {self.peer} cannot be read: {error.strerror}")

    def frame_of(self, segment: Segment, offset: int, num_bytes: int) -> OutgoingFrame:
        """Return the frame of a message of `num_bytes` that lies in a segment, to be read there."""
        if not segment.is_kept:
            segment.unread += 1
            self.unread[segment.number] += 1
        if segment.number in self.known:
            return OutgoingFrame(memoryview(FRAME.pack(MESSAGE, segment.is_kept, segment.number, offset, num_bytes)))
        self.known.add(segment.number)
        frame = FRAME.pack(NEW_SEGMENT, segment.is_kept, segment.number, offset, num_bytes)
        return OutgoingFrame(memoryview(frame), segment.descriptor)

    def done_with(self, segment: int) -> OutgoingFrame:
        """Return the frame that says that a message has been read."""
        return OutgoingFrame(memoryview(FRAME.pack(DONE, False, segment, 0, 0)))

    def end(self, arena: Arena) -> None:
        """Close it, and free the space of messages that the peer will not read. Those that have come are lost too."""
        while self.read(arena):
            pass
        for segment, messages in self.unread.items():
            arena.free(segment, messages)
        self.arrived.clear()
        self.mapped.clear()
        self.closed = True
        self.link.close()
