"""Where a rank is reached by its caller and by other ranks: connections of those that have the key of the session."""

import contextlib
import secrets
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from patchpar.errors import AuthenticationError
from patchpar.launch.network.handshake import READY, admit
from patchpar.launch.network.tagged_socket import RankAddress, TaggedSocket

HANDSHAKE_SECONDS = 10.0  # for a process that has connected to prove that it may
MOST_HANDSHAKES = 64  # at a time: strangers may connect, too; who has kept silent for longest is closed for the next
RETRY_SECONDS = 0.1  # after a connection that could not be accepted


class RankListener:
    """Accepts connections until `close`. `host`: the address of this node, where a port is opened.

    `key`: of the session. Raises OSError.
    """

    def __init__(self, node: str, host: str, key: bytes) -> None:
        self._key, self._changed = key, threading.Condition()
        self._arrived: dict[bytes, deque[TaggedSocket]] = defaultdict(deque)  # by token, in order
        self._forgotten: set[bytes] = set()
        self._is_closed = False
        self._unproven: dict[socket.socket, None] = {}  # connections in their handshake, the oldest first
        self._proving = threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sockets = [socket.create_server((host, 0), family=family, backlog=MOST_HANDSHAKES)]
        name = f"patchpar-{secrets.token_hex(16)}" if sys.platform == "linux" else ""
        if name:
            local = socket.socket(socket.AF_UNIX)
            local.bind("\0" + name)
            local.listen(MOST_HANDSHAKES)
            self._sockets.append(local)
        self.address = RankAddress(node, host, self._sockets[0].getsockname()[1], name)
        for each in self._sockets:
            threading.Thread(target=self._accept, args=(each,), name="patchpar-listener", daemon=True).start()

    def take(self, token: bytes, give_up: float, is_over: Callable[[], bool] = bool) -> TaggedSocket:
        """Return the next connection to what `token` names.

        Raises TimeoutError at `give_up` (time.monotonic()), and ConnectionResetError if `is_over`, after `forget`.
        """
        with self._changed:
            while not self._arrived.get(token):
                if is_over():
                    raise ConnectionResetError("the link has ended")
                if (left := give_up - time.monotonic()) <= 0:
                    raise TimeoutError("it has not connected")
                self._changed.wait(left)
            return self._arrived[token].popleft()

    def forget(self, token: bytes) -> None:
        """Close the connections to what `token` names that nobody has taken, and those that come later."""
        with self._changed:
            self._forgotten.add(token)
            for link in self._arrived.pop(token, ()):
                link.close()
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no further connections. Idempotent."""
        self._is_closed = True
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # else `accept` would go on to wait
            each.close()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                link, _ = server.accept()
            except OSError:  # that client has gone meanwhile, or there are too many descriptors for now
                if self._is_closed:
                    return
                time.sleep(RETRY_SECONDS)
                continue
            self._begin(link)
            threading.Thread(target=self._admit, args=(link,), name="patchpar-handshake", daemon=True).start()

    def _begin(self, link: socket.socket) -> None:
        """Note a connection in its handshake; a rank needs milliseconds for that, so that the oldest is a stranger."""
        with self._proving:
            if len(self._unproven) >= MOST_HANDSHAKES:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends then
            self._unproven[link] = None

    def _admit(self, link: socket.socket) -> None:
        """Queue a connection whose client has the key; close any other."""
        try:
            with contextlib.suppress(OSError, AuthenticationError):
                token, keys = admit(link, self._key, time.monotonic() + HANDSHAKE_SECONDS)
                self._end(link)
                if link.family != getattr(socket, "AF_UNIX", None):
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.settimeout(None)
                with self._changed:
                    if token not in self._forgotten:
                        self._queue(token, TaggedSocket(link, keys))
        finally:
            self._end(link)
            link.close()

    def _end(self, link: socket.socket) -> None:
        with self._proving:
            self._unproven.pop(link, None)

    def _queue(self, token: bytes, link: TaggedSocket) -> None:
        """Let a connection be taken, with the lock held: who takes it sends nothing that the client reads as READY."""
        try:
            link.sendall(READY)
        except OSError:  # the client has given up: what it connects next must not come behind this
            link.close()
            raise
        self._arrived[token].append(link)
        self._changed.notify_all()
