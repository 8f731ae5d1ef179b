"""A connected socket with the keys by which its messages are authenticated, and where a rank listens."""

import hmac
import socket
import struct
import time
from typing import NamedTuple

from patchpar.launch.network.handshake import LEAST_SECONDS, ConnectionKeys, introduce

TAG_BYTES = 32
NUMBER = struct.Struct("<Q")
RETRY_SECONDS = 0.01


class RankAddress(NamedTuple):
    """Where a rank listens: a port of `host`, and for ranks of its own node an abstract socket of Linux."""

    node: str
    host: str
    port: int
    name: str


class MessageTag:
    """Tags of the messages in one direction: HMAC-SHA256 over the number of the message and its parts."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def next(self, *parts: bytes | memoryview | bytearray) -> bytes:
        """Return the tag of the next message."""
        code = hmac.new(self._key, NUMBER.pack(self._number), "sha256")
        self._number += 1
        for part in parts:
            code.update(part)
        return code.digest()


class TaggedSocket(socket.socket):
    """A socket, in place of the plain `link`. Who uses it tags what is sent, and checks what is received."""

    def __init__(self, link: socket.socket, keys: ConnectionKeys) -> None:
        super().__init__(fileno=link.detach())
        self.sent, self.received = MessageTag(keys.send), MessageTag(keys.receive)

    @property
    def is_of_one_node(self) -> bool:
        """Whether the kernel of one machine carries it, with descriptors."""
        return self.family == getattr(socket, "AF_UNIX", None)


def connect_to(address: RankAddress, node: str, key: bytes, token: bytes, give_up: float) -> TaggedSocket:
    """Connect from a process on `node` to what `token` names at a rank. `give_up`: of time.monotonic().

    Raises OSError, and AuthenticationError as `introduce` does.
    """
    seconds = max(LEAST_SECONDS, give_up - time.monotonic())
    if address.node == node and address.name:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(seconds)
    else:
        link = socket.create_connection((address.host, address.port), seconds)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if link.family == getattr(socket, "AF_UNIX", None):
            _connect_here(link, "\0" + address.name, give_up)
        keys = introduce(link, key, token, give_up)
        link.settimeout(None)
        return TaggedSocket(link, keys)
    except BaseException:
        link.close()
        raise


def _connect_here(link: socket.socket, name: str, give_up: float) -> None:
    """Connect to an abstract socket of this node. Unlike TCP it does not wait while the other end's queue is full."""
    while True:
        try:
            return link.connect(name)
        except BlockingIOError as error:
            if time.monotonic() > give_up:
                raise TimeoutError("it does not accept connections") from error
            time.sleep(RETRY_SECONDS)
