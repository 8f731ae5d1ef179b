"""The socket to a peer on another node: messages with their values, which no memory carries.

    message:  [FRAME: kind, 0, bytes of the room that the tensors lie in, bytes of the tensors] [tag] [tag]  values

The values lie as in shared memory, each tensor aligned. Tags have 32 bytes: the first covers the frame, so that no
memory is taken for a length that the peer has not sent, the second the values. Both cover how many tags came before, so
that nothing is read that another process has sent, changed, repeated or left out. They cost a pass of SHA-256 over the
values, and some microseconds.
"""

import hmac
import socket
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from patchpar.comm.transport.arena import Arena, Segment
from patchpar.comm.transport.peer_socket import FRAME, MESSAGE, ArrivedMessage, OutgoingFrame, PeerSocket
from patchpar.errors import AuthenticationError
from patchpar.launch.anonymous_file import aligned
from patchpar.launch.network.tagged_socket import TAG_BYTES, TaggedSocket

NOWHERE = -1
"""The segment of what has been read from the socket."""
HEAD_BYTES = FRAME.size + 2 * TAG_BYTES
NOTHING = OutgoingFrame(memoryview(b""))


@runtime_checkable
class PartCounter(Protocol):
    """Where a rank says that a long message moves, while the process waits for the rest of it."""

    def count_part(self) -> None:
        """Count a part that has come or gone."""


def is_between_nodes(link: socket.socket) -> bool:
    """Whether a line goes through a network."""
    return isinstance(link, TaggedSocket) and not link.is_of_one_node


class PeerStream(PeerSocket):
    """The socket to one peer on another node, and the messages received through it."""

    def __init__(self, peer: int, link: socket.socket) -> None:
        super().__init__(peer, link)
        assert isinstance(link, TaggedSocket)
        self._tags = link
        self._take: Callable[[memoryview], None] = self._take_head
        self._target, self._filled = memoryview(bytearray(HEAD_BYTES)), 0
        self._num_bytes, self._tag = 0, b""  # of the values that come next

    def frame_of(self, segment: Segment, offset: int, num_bytes: int) -> OutgoingFrame:
        """See PeerSocket: the message itself, so that its space may be used again at once."""
        room = aligned(num_bytes) if segment.is_kept else segment.used - offset
        values = segment.memory[offset : min(offset + room, segment.memory.numel())].numpy().data
        frame, tags = FRAME.pack(MESSAGE, False, 0, len(values), num_bytes), self._tags.sent
        return OutgoingFrame(memoryview(b"".join((frame, tags.next(frame), tags.next(values), values))))

    def done_with(self, segment: int) -> OutgoingFrame:
        """See PeerSocket: the sender knows."""
        return NOTHING

    def read(self, arena: Arena) -> bool:
        """See PeerSocket. Raises AuthenticationError for a message that the peer has not sent."""
        if self.closed:
            return False
        try:
            received = self.link.recv_into(self._target[self._filled :])
        except BlockingIOError:
            return False
        except OSError:
            received = 0
        self.closed = not received
        self._filled += received
        self.moved += received
        if self._filled == len(self._target):
            self._take(self._target)
        return True

    def _expect(self, take: Callable[[memoryview], None], target: memoryview) -> None:
        self._take, self._target, self._filled = take, target, 0
        if not target:
            take(target)

    def _take_head(self, head: memoryview) -> None:
        frame, self._tag = head[: FRAME.size], bytes(head[FRAME.size + TAG_BYTES :])
        self._check(head[FRAME.size : FRAME.size + TAG_BYTES], frame)
        _, _, _, room, self._num_bytes = FRAME.unpack(frame)
        self._memory = torch.empty(room, dtype=torch.uint8)
        self._expect(self._take_values, self._memory.numpy().data)

    def _take_values(self, values: memoryview) -> None:
        self._check(self._tag, values)
        self.arrived[self.num_arrived] = ArrivedMessage(NOWHERE, self._memory, 0, self._num_bytes)
        self.num_arrived += 1
        self._expect(self._take_head, memoryview(bytearray(HEAD_BYTES)))

    def _check(self, tag: bytes | memoryview, data: memoryview) -> None:
        if not hmac.compare_digest(tag, self._tags.received.next(data)):
            self.closed = True
            raise AuthenticationError(
                f"a message that rank {self.peer} should have sent was changed on the way, or somebody else has sent "
                "it. It was not used. Create the pipeline again, on a network that only its nodes can reach"
            )
