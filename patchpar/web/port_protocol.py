"""HTTP/1.1 of a port: the head of a request has a limit of size and of time, since nobody is known before it has come.

h11 reads 64 KiB of a head. httptools, which uvicorn takes where it is installed, reads heads of any size; both wait for
the rest of one without end.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0


class PortProtocol(H11Protocol):
    """A connection, which is closed if the head of a request has not come whole within HEAD_SECONDS."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_watch()

    def _watch(self) -> None:
        """Begin to count where a head is awaited; end it where one has come, also of a WebSocket."""
        if self.transport.get_protocol() is not self or self.conn.their_state is not h11.IDLE:
            self._end_watch()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _end_watch(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            late.cancel()
