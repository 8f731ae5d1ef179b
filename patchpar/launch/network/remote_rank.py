"""One rank in a process of another node, such as an actor of Ray: its listener, and the worker's loop in it."""

import contextlib
import importlib
import os
import socket
import time
from dataclasses import dataclass, field

from patchpar.errors import PlanError
from patchpar.launch.anonymous_file import anonymous_file
from patchpar.launch.handshake import WorkerConfig
from patchpar.launch.heartbeat import PAGE_BYTES, Heartbeat
from patchpar.launch.links import RankLink
from patchpar.launch.messages import EncodedMessage, decode
from patchpar.launch.network.handshake import session_key
from patchpar.launch.network.listener import RankListener
from patchpar.launch.network.network_link import NetworkLink
from patchpar.launch.network.stream_channel import StreamChannel
from patchpar.launch.network.tagged_socket import RankAddress
from patchpar.launch.rendezvous import this_host
from patchpar.launch.shared_secret import read_secret
from patchpar.launch.worker import Worker, WorkerContext


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """What a caller says to the processes of ranks first. `nonce`: sampled for this session.

    `secret_file`: a path on each node; without one `nonce` is a key that only these processes know. `modules`: what the
    ranks will import, which takes so long that they do it before anybody waits for their answers.
    """

    secret_file: str | None
    nonce: bytes = field(repr=False)
    modules: tuple[str, ...] = ()

    def key(self) -> bytes:
        """Return the key of the session. Raises PlanError for a secret file that cannot be used here."""
        return session_key(b"" if self.secret_file is None else read_secret(self.secret_file), self.nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyRank:
    """What a process of a rank answers. `host`: see `this_host`. `problem`: why it cannot work, instead of the rest.

    `store_port`: where this process listens for the store of a default group, which rank 0 opens.
    """

    host: str
    pid: int
    address: RankAddress | None = None
    store_port: int = 0
    problem: str = ""


class NodeContext(WorkerContext):
    """The RankContext of a rank whose caller may be on another node."""

    def __init__(
        self, config: WorkerConfig, channel: StreamChannel, heartbeat: Heartbeat, listener: RankListener, key: bytes
    ) -> None:
        super().__init__(config, channel, heartbeat)
        self._listener, self._key = listener, key

    def _link_of(self, message: EncodedMessage) -> RankLink:
        """Return the link of a LINK frame: of a rank that listens, and a token."""
        peer, address, token = decode(message)
        return NetworkLink(self.rank, peer, self._listener, address, self._key, token)


class RemoteRank:
    """The process of one rank. `node`: where it is, the same for all ranks of a host that can map common memory.

    `host`: the address under which other nodes reach this one.
    """

    def __init__(self, node: str, host: str) -> None:
        self._node, self._host = node, host

    def prepare(self, start: SessionStart) -> ReadyRank:
        """Listen for the caller and other ranks, and import what takes long. What is missing `serve` reports."""
        for name in start.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        try:
            self._key = start.key()
            self._listener = RankListener(self._node, self._host, self._key)
            self._store_listener = _listener_at(self._host)
        except (PlanError, OSError) as error:
            return ReadyRank(host=this_host(), pid=os.getpid(), problem=str(error))
        port = int(self._store_listener.getsockname()[1])
        return ReadyRank(host=this_host(), pid=os.getpid(), address=self._listener.address, store_port=port)

    def serve(self, token: bytes, seconds: float) -> None:
        """Run calls of the caller, which connects to `token` within so many seconds, until this process ends.

        Raises TimeoutError if it does not connect.
        """
        link = self._listener.take(token, time.monotonic() + seconds)
        page = anonymous_file("patchpar-heartbeat")
        os.ftruncate(page, PAGE_BYTES)
        heartbeat = Heartbeat(page)
        channel = StreamChannel(link, note=heartbeat.snapshot)
        first = channel.receive()
        config: WorkerConfig = decode(first.message)
        context = NodeContext(config, channel, heartbeat, self._listener, self._key)
        if config.rank == 0 and config.group_store is not None:
            context.store_listener = self._store_listener
        else:
            self._store_listener.close()
        Worker(channel, config, context).run(first.request)


def _listener_at(host: str) -> socket.socket:
    """Return a socket that listens at a port which the system chooses, and which nobody else can take meanwhile."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)
