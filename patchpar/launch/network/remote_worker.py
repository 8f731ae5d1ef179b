"""Ranks on several nodes, seen from their caller: how they start, what is known of each, and how it is ended."""

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from patchpar.errors import AuthenticationError, LaunchError
from patchpar.launch.channel import SEND_TIMEOUT, ChannelClosed, ChannelFrame, FrameKind
from patchpar.launch.handshake import GroupStore
from patchpar.launch.heartbeat import SentHeartbeat
from patchpar.launch.messages import encode
from patchpar.launch.network.handshake import TOKEN_BYTES
from patchpar.launch.network.remote_rank import ReadyRank, SessionStart
from patchpar.launch.network.stream_channel import StreamChannel
from patchpar.launch.network.tagged_socket import RankAddress, TaggedSocket, connect_to
from patchpar.launch.rank_process import RankProcess
from patchpar.launch.rendezvous import this_host
from patchpar.launch.worker_output import FirstPrinter
from patchpar.launch.worker_start import WorkerPoolSpec

POLL_SECONDS = 0.02  # between questions whether a process has ended
END_SECONDS = 0.5  # for the news that a process has ended, whose connection has
CONNECT_SECONDS = 30.0  # for a process that listens to answer
NO_TRUST = (
    "the ranks are on several hosts ({hosts}), where they would unpickle, and so run, whatever is sent to them over "
    "the network. Pass secret_file=, a file that all hosts have under this path and nobody else can read "
    "(--secret-file), or trusted_network=True (--trusted-network) where nobody else can reach the network"
)


class RankActor(Protocol):
    """A process that has been placed on a node to be one rank."""

    def prepare(self, start: SessionStart) -> None:
        """Begin `RemoteRank.prepare` there."""

    def ready(self, give_up: float) -> ReadyRank:
        """Return what `RemoteRank.prepare` has returned. Raises LaunchError, also at `give_up`."""

    def serve(self, token: bytes, seconds: float) -> None:
        """Begin `RemoteRank.serve` there."""

    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""

    def how_it_ended(self) -> str:
        """Return what is known of its end, as text."""

    def kill(self) -> None:
        """End the process; does not wait."""


class RankActors(Protocol):
    """Places processes on nodes."""

    @property
    def node(self) -> str:
        """The node of the caller; empty if it is none."""

    def start(self, ranks: Sequence[int], give_up: float) -> Mapping[int, RankActor]:
        """Place a process for each rank. Raises LaunchError, also at `give_up`."""


class RemoteWorker:
    """The process of a rank on another node."""

    def __init__(self, rank: int, device: str, actor: RankActor, ready: ReadyRank, link: TaggedSocket) -> None:
        assert ready.address is not None
        self.rank, self.device, self.address = rank, device, ready.address
        self.heartbeat = SentHeartbeat()
        self.channel = StreamChannel(link, send_timeout=SEND_TIMEOUT, on_note=self.heartbeat.update)
        self._actor, self._pid = actor, ready.pid

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.device} of node {self.address.host}, pid {self._pid})"

    def wait_for_pid(self, give_up: float) -> int:
        """See RankProcess."""
        return self._pid

    def is_alive(self) -> bool:
        """See RankProcess."""
        return not self._actor.has_ended()

    def last_exchange_point(self) -> str:
        """See RankProcess. It is that of its last message, which answers a ping."""
        where = self.heartbeat.where
        return f"last known exchange point {where!r}" if where else "before its first exchange point"

    def last_output(self) -> str:
        """See RankProcess. Ray prints it where the caller runs."""
        return ""

    def dump_stack(self) -> None:
        """See RankProcess. `ray stack` on its node prints it."""

    def how_it_ended(self) -> str:
        """See RankProcess."""
        self.wait(time.monotonic() + END_SECONDS)
        return self._actor.how_it_ended() if self._actor.has_ended() else "has closed its connection"

    def ask_to_stop(self) -> None:
        """See RankProcess. By whom it was placed, not by a frame: an actor that exits by itself looks like a fault."""
        self._actor.kill()

    def terminate(self) -> None:
        """See RankProcess."""
        self._actor.kill()

    def kill(self) -> None:
        """See RankProcess. `release` closes the channel, which would end it, too."""
        self._actor.kill()

    def wait(self, give_up: float) -> bool:
        """See RankProcess."""
        while self.is_alive():
            if time.monotonic() >= give_up:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def after_fork(self) -> None:
        """See RankProcess."""
        self.channel.close()

    def release(self) -> None:
        """See RankProcess."""
        self.channel.close()


class RemoteStarter:
    """Starts the ranks of `spec` in processes that `actors` places. See ProcessStarter.

    `devices`: torch's name of each rank's device where it runs. `secret_file`, `trusted_network`: as of
    TorchrunExecutor; needed as soon as ranks and caller are on several hosts.
    """

    def __init__(
        self,
        spec: WorkerPoolSpec,
        actors: RankActors,
        devices: Sequence[str],
        *,
        secret_file: Path | None,
        trusted_network: bool,
    ) -> None:
        self._spec, self._actors, self._devices = spec, actors, tuple(devices)
        self._is_known = secret_file is not None or trusted_network
        secret = None if secret_file is None else str(secret_file)
        modules = ("torch", spec.engine.partition(":")[0], *spec.preload)
        self._session = SessionStart(secret_file=secret, nonce=secrets.token_bytes(TOKEN_BYTES), modules=modules)

    def start(self, ranks: Sequence[int], store: GroupStore | None, speakers: FirstPrinter) -> Iterator[RankProcess]:
        """See ProcessStarter. What the ranks print is not read here."""
        give_up = time.monotonic() + self._spec.start_timeout
        key = self._session.key()
        actors = self._actors.start(ranks, give_up)
        try:
            for actor in actors.values():
                actor.prepare(self._session)
            ready = {rank: _ready(rank, actor, give_up) for rank, actor in actors.items()}
            self._refuse_strangers(ready)
            workers = [self._connected(rank, actors[rank], ready[rank], key) for rank in ranks]
        except BaseException:
            for actor in actors.values():
                actor.kill()
            raise
        where = f"tcp://{workers[0].address.host}:{ready[ranks[0]].store_port}" if store else None
        yield from workers  # all before any can fail: the pool ends those that it knows
        for worker in workers:
            config = replace(self._spec.config(worker.rank, store, 1, None), device=self._devices[worker.rank])
            message = encode(replace(config, group_store=where))
            with contextlib.suppress(ChannelClosed, TimeoutError):  # noticed by the RequestLoop
                worker.channel.send(ChannelFrame(FrameKind.CONFIG, 0, message))

    def _refuse_strangers(self, ready: Mapping[int, ReadyRank]) -> None:
        """Raise LaunchError if ranks or caller are on several hosts that have nothing by which to know one another."""
        found = {each.host: each.address.host for each in ready.values() if each.address is not None}
        if not self._is_known and ({*found} != {this_host()} or "" in found):
            raise LaunchError(NO_TRUST.format(hosts=", ".join(sorted({"this one", *found.values()}))))

    def _connected(self, rank: int, actor: RankActor, ready: ReadyRank, key: bytes) -> RemoteWorker:
        assert ready.address is not None
        token = secrets.token_bytes(TOKEN_BYTES)
        actor.serve(token, CONNECT_SECONDS)
        try:
            link = connect_to(ready.address, self._actors.node, key, token, time.monotonic() + CONNECT_SECONDS)
        except (OSError, AuthenticationError) as error:
            raise LaunchError(
                f"rank {rank} on node {ready.address.host} cannot be reached at port {ready.address.port}: {error}. "
                "Nodes have to reach one another, and this process them, on ports that the system chooses"
            ) from error
        return RemoteWorker(rank, self._devices[rank], actor, ready, link)

    def link(self, one: RankProcess, other: RankProcess) -> None:
        """See ProcessStarter: the address of the higher rank, and a token by which it knows the lines of this link."""
        token = secrets.token_bytes(TOKEN_BYTES)
        lower, higher = sorted((one, other), key=lambda worker: worker.rank)
        address = _address_of(higher)
        for worker, peer in ((lower, higher), (higher, lower)):
            message = encode((peer.rank, address, token))
            with contextlib.suppress(ChannelClosed, TimeoutError):  # noticed when the request is sent
                worker.channel.send(ChannelFrame(FrameKind.LINK, 0, message))
            message.close()


def _ready(rank: int, actor: RankActor, give_up: float) -> ReadyRank:
    found = actor.ready(give_up)
    if found.problem:
        raise LaunchError(f"rank {rank} cannot start: {found.problem}")
    return found


def _address_of(worker: RankProcess) -> RankAddress:
    assert isinstance(worker, RemoteWorker)
    return worker.address
