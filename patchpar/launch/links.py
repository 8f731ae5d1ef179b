"""Connections between ranks: a link for every two of them, through which they make lines.

Workers get links from the process that started them (`pool`), and new ones after a fault; ranks of torchrun get theirs
from rank 0 (`rendezvous`). Nobody listens, except ranks on several nodes (`network`). A line is a socket pair that the
lower rank makes, and of which it sends the higher rank an end: each transport has lines of its own.
"""

import contextlib
import errno
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod

from patchpar.launch.descriptors import receive_with_descriptors

RETRY_SECONDS = 0.01
LINE = b"l"


class RankLink(ABC):
    """The link of `rank` to `peer`."""

    def __init__(self, rank: int, peer: int) -> None:
        self.rank, self.peer = rank, peer
        self._lines: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock, self._is_shut = threading.Lock(), False

    @abstractmethod
    def offer(self, give_up: float) -> socket.socket:
        """On the lower rank: make a line, give the peer its end, and return the other. Raises OSError.

        `give_up`: time.monotonic() until which the peer may take it, else TimeoutError.
        """

    @abstractmethod
    def accept(self, give_up: float) -> socket.socket:
        """On the higher rank: return the end of a line that the peer has made. Raises OSError as `offer` does."""

    def _known(self, line: socket.socket) -> socket.socket:
        """Return a line that `shut` will end. Raises ConnectionResetError if it has been called meanwhile."""
        with self._lock:
            self._lines.add(line)
            is_shut = self._is_shut
        if is_shut:
            line.close()
        self._check()
        return line

    def _check(self) -> None:
        if self._is_shut:
            raise ConnectionResetError("the link has ended")

    def shut(self) -> None:
        """End the link and its lines, from any thread: whoever waits for the peer goes on with an error."""
        with self._lock:
            self._is_shut, lines = True, tuple(self._lines)
        for each in lines:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    @abstractmethod
    def close(self) -> None:
        """Close this end. Idempotent."""


class PeerLink(RankLink):
    """The link to a rank of the same host, over the connected socket `control`."""

    def __init__(self, rank: int, peer: int, control: socket.socket) -> None:
        super().__init__(rank, peer)
        self._control = control
        control.set_inheritable(False)

    def offer(self, give_up: float) -> socket.socket:
        """See RankLink."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                send_descriptor(self._control, LINE, theirs.fileno(), give_up)
            except BaseException:
                ours.close()
                raise
        return self._known(ours)

    def accept(self, give_up: float) -> socket.socket:
        """See RankLink."""
        _, descriptor = receive_descriptor(self._control, len(LINE), give_up)
        return self._known(socket.socket(fileno=descriptor))

    def shut(self) -> None:
        """See RankLink."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        super().shut()

    def close(self) -> None:
        """See RankLink."""
        self._control.close()


def send_descriptor(link: socket.socket, data: bytes, descriptor: int, give_up: float) -> None:
    """Send a few bytes with a descriptor. Raises OSError, a TimeoutError where they are not taken until `give_up`."""
    while True:
        link.settimeout(max(RETRY_SECONDS, give_up - time.monotonic()))
        try:
            socket.send_fds(link, [data], [descriptor])  # so few bytes are sent whole or not at all
            return
        except OSError as error:
            # The kernel limits the number of descriptors that have been sent and not received.
            if error.errno != errno.ETOOMANYREFS:
                raise
            if time.monotonic() > give_up:
                raise TimeoutError(str(error)) from error
            time.sleep(RETRY_SECONDS)


def receive_descriptor(link: socket.socket, num_bytes: int, give_up: float) -> tuple[bytes, int]:
    """Return what `send_descriptor` has sent. Raises OSError, a TimeoutError if it has not come by `give_up`."""
    link.settimeout(max(RETRY_SECONDS, give_up - time.monotonic()))
    data, descriptors = receive_with_descriptors(link, num_bytes, 1)
    if not data:
        raise ConnectionResetError("it has closed the connection")
    return data, descriptors[0]
