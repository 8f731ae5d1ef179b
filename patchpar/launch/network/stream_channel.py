"""A channel between nodes: as a channel over a socket pair, with the blocks of messages sent as bytes, and tags.

    packet:  [frame and block u64][note u32] [tag]  note  frame  block  [tag]

Tags have 32 bytes: the first covers the lengths, so that nobody waits for, or keeps, bytes that the other end has not
announced; the second what follows. The note of a rank is its heartbeat, which the caller of a worker on its own host
reads from shared memory.
"""

import hmac
import struct
from collections.abc import Callable, Iterator, Sequence

from patchpar.errors import AuthenticationError
from patchpar.launch.channel import Channel, ChannelFrame, FrameHead, frame_bytes
from patchpar.launch.network.tagged_socket import TAG_BYTES, TaggedSocket
from patchpar.launch.shared_blocks import SharedBlock, SharedBlockWriter

PACKET = struct.Struct("<QI")
HEAD_BYTES = PACKET.size + TAG_BYTES


class StreamChannel(Channel):
    """One end of a connection. `note`: what is sent with each frame; `on_note`: gets that of the other end.

    `send_timeout`: seconds, see Channel.
    """

    def __init__(
        self,
        sock: TaggedSocket,
        *,
        send_timeout: float | None = None,
        note: Callable[[], bytes] = bytes,
        on_note: Callable[[bytes], object] = bytes,
    ) -> None:
        super().__init__(sock, send_timeout=send_timeout)
        self._tags, self._note, self._on_note = (sock.sent, sock.received), note, on_note
        self._lengths: tuple[int, int] | None = None  # of the packet that has begun to come

    def _parts(self, frame: ChannelFrame) -> Iterator[tuple[memoryview, Sequence[int]]]:
        block = frame.message.block
        memory = memoryview(b"") if block is None else block.map()
        note, head = self._note(), frame_bytes(frame)
        lengths, content = PACKET.pack(len(head) + len(memory), len(note)), note + head
        begin = lengths + self._tags[0].next(lengths) + content
        tag = self._tags[0].next(content, memory)
        if memory:
            yield memoryview(begin), ()
            yield memory, ()
        yield memoryview(tag if memory else begin + tag), ()

    def _take(self) -> ChannelFrame | None:
        """See Channel. Raises AuthenticationError for a packet that the other end has not sent."""
        if self._lengths is None:
            if len(self._bytes) < HEAD_BYTES:
                return None
            head = bytes(self._bytes[:HEAD_BYTES])
            self._check(head[PACKET.size :], head[: PACKET.size])
            num_bytes, note_bytes = PACKET.unpack_from(head)
            self._lengths = num_bytes, note_bytes
        num_bytes, note_bytes = self._lengths
        start, end = HEAD_BYTES + note_bytes, HEAD_BYTES + note_bytes + num_bytes
        if len(self._bytes) < end + TAG_BYTES:
            return None
        packet, self._bytes, self._lengths = memoryview(self._bytes), self._bytes[end + TAG_BYTES :], None
        self._check(packet[end : end + TAG_BYTES], packet[HEAD_BYTES:end])
        self._on_note(bytes(packet[HEAD_BYTES:start]))
        return _frame(packet[start:end])

    def _check(self, tag: bytes | memoryview, data: bytes | memoryview) -> None:
        if not hmac.compare_digest(tag, self._tags[1].next(data)):
            raise AuthenticationError(
                "a message between nodes was changed on the way, or somebody else has sent it. Nothing of it was read. "
                "Create the pipeline again, on a network that only its nodes can reach"
            )


def _frame(data: memoryview) -> ChannelFrame:
    head = FrameHead.read(data)
    assert head is not None, "it has the tag of the other end"
    block = _block(data[head.num_bytes :]) if head.has_block else None
    return head.frame(data, block)


def _block(data: memoryview) -> SharedBlock:
    """Return a block of this process with these bytes."""
    writer = SharedBlockWriter()
    writer.append(data)
    block = writer.finish()
    assert block is not None
    return block
