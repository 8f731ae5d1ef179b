"""Messages over socket pairs. No port is opened: both ends are inherited or passed, so no other process can write.

    frame:  [kind u8][has block u8][request u32][spans u32][stream u64][block u64]  spans  stream

The block of a message is not copied: its descriptor is sent with the first byte of the frame.
"""

import enum
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from patchpar.launch.descriptors import receive_with_descriptors
from patchpar.launch.messages import EncodedMessage
from patchpar.launch.shared_blocks import SharedBlock

HEAD = struct.Struct("<BBIIQQ")
SPAN = struct.Struct("<QQ")
SEND_TIMEOUT = 10.0  # s; a worker's reader thread reads at once unless the process is stopped, stuck or being started
LOOKS = 10
"""How often within `send_timeout` a channel asks whether the other end is working."""
EMPTY = EncodedMessage(stream=b"")


class FrameKind(enum.IntEnum):
    """Kinds of frames. First line: caller to worker; second line: worker to caller."""

    CONFIG, FORM, CALL, REPLY, PING, STOP, MESSAGE, RANKS, LINK, ABORT, HOLD, HALT = range(12)
    EVENT, ASK, PONG, RESULT, FAILED, HELD = range(20, 26)


@dataclass(frozen=True, slots=True)
class ChannelFrame:
    """A message with its kind and its request number."""

    kind: FrameKind
    request: int
    message: EncodedMessage = EMPTY


class FrameHead(NamedTuple):
    """What the first bytes of a frame say. `num_bytes`: of the frame without its block."""

    kind: FrameKind
    has_block: bool
    request: int
    num_spans: int
    stream_bytes: int
    block_bytes: int

    @classmethod
    def read(cls, data: bytes | bytearray | memoryview) -> "FrameHead | None":
        """Return the head of the frame with which `data` begins; None if not all of it is there."""
        if len(data) < HEAD.size:
            return None
        kind, has_block, *sizes = HEAD.unpack_from(data)
        return cls(FrameKind(kind), bool(has_block), *sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the frame without its block."""
        return HEAD.size + self.num_spans * SPAN.size + self.stream_bytes

    def frame(self, data: bytes | bytearray | memoryview, block: SharedBlock | None) -> ChannelFrame:
        """Return the frame that lies at the beginning of `data`."""
        start = HEAD.size + self.num_spans * SPAN.size
        spans = tuple(SPAN.iter_unpack(bytes(data[HEAD.size : start])))
        message = EncodedMessage(stream=bytes(data[start : self.num_bytes]), spans=spans, block=block)
        return ChannelFrame(self.kind, self.request, message)


def frame_bytes(frame: ChannelFrame) -> bytes:
    """Return a frame as bytes, without its block."""
    message, block = frame.message, frame.message.block
    size = block.size if block is not None else 0
    head = HEAD.pack(frame.kind, block is not None, frame.request, len(message.spans), len(message.stream), size)
    return head + b"".join(SPAN.pack(*span) for span in message.spans) + message.stream


class ChannelClosed(Exception):
    """The other end is closed."""


class Channel:
    """One end of a socket pair. Seconds without a limit are None.

    `send_timeout`: how long the other end may read nothing while `is_working` is False. It is asked again and again
    while nothing is read, and says whether the process at the other end has worked since: one that is being started
    on a busy machine reads later. `longest`: how long it may read nothing in any case.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        send_timeout: float | None = None,
        is_working: Callable[[], bool] = bool,
        longest: float = 120.0,
    ) -> None:
        self._sock = sock
        self._is_working, self._longest = is_working, longest
        self._sock.settimeout(None if send_timeout is None else send_timeout / LOOKS)
        self._lock = threading.Lock()
        self._is_cut = False  # a frame has been sent in part only, so that nothing can follow it
        self._bytes = bytearray()
        self._descriptors: list[int] = []

    @property
    def pending(self) -> int:
        """Bytes of a frame of which only a part has come."""
        return len(self._bytes)

    def fileno(self) -> int:
        """Return the file descriptor, for select."""
        return self._sock.fileno()

    def send(self, frame: ChannelFrame) -> None:
        """Send a frame; thread-safe. Raises ChannelClosed, and TimeoutError if the other end does not read.

        After a TimeoutError every further frame raises one at once: the other end would read it as the rest of this.
        """
        with self._lock:
            if self._is_cut:
                raise TimeoutError("the other end has not read all of an earlier message")
            try:
                for data, descriptors in self._parts(frame):
                    self._is_cut = True
                    self._send_all(data, descriptors)
                self._is_cut = False
            except TimeoutError:
                raise
            except OSError as error:
                self._is_cut = False  # every further frame fails in this way too
                raise ChannelClosed(str(error)) from error

    def _parts(self, frame: ChannelFrame) -> Iterator[tuple[memoryview, Sequence[int]]]:
        """Yield what is sent for a frame: bytes, and descriptors that go with the first of them."""
        block = frame.message.block
        yield memoryview(frame_bytes(frame)), [block.fd] if block is not None else []

    def _send_all(self, data: memoryview, descriptors: Sequence[int]) -> None:
        """Send bytes, the descriptors with the first of them."""
        idle, give_up = 0, time.monotonic() + self._longest
        while data:
            try:
                sent = socket.send_fds(self._sock, [data], descriptors)
            except TimeoutError:
                idle = 0 if self._is_working() else idle + 1
                if idle >= LOOKS or time.monotonic() >= give_up:
                    raise
            else:
                data, descriptors = data[sent:], ()
                idle, give_up = 0, time.monotonic() + self._longest

    def receive(self) -> ChannelFrame:
        """Wait for the next frame and return it.

        Raises ChannelClosed, and OSError where this process can have no further descriptor.
        """
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            self._read()

    def receive_ready(self) -> Iterator[ChannelFrame]:
        """Read once and yield the complete frames. Call it after select. Raises as `receive` does."""
        self._read()
        while (frame := self._take()) is not None:
            yield frame

    def _read(self) -> None:
        try:
            data, descriptors = receive_with_descriptors(self._sock, 1 << 18, 64)
        except TimeoutError:  # there is nothing, though `select` has said so
            return
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise
            raise ChannelClosed(str(error)) from error
        self._descriptors += descriptors
        if not data:
            raise ChannelClosed("end of file")
        self._bytes += data

    def _take(self) -> ChannelFrame | None:
        """Return the next frame if all of it has come, None otherwise."""
        head = FrameHead.read(self._bytes)
        if head is None or len(self._bytes) < head.num_bytes:
            return None
        block = SharedBlock(self._descriptors.pop(0), head.block_bytes) if head.has_block else None
        frame = head.frame(self._bytes, block)
        del self._bytes[: head.num_bytes]
        return frame

    def close(self) -> None:
        """Close this end, and the descriptors of frames of which only a part has come."""
        self._sock.close()
        while self._descriptors:
            os.close(self._descriptors.pop())
