"""Start the processes of a pool's workers."""

import contextlib
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from patchpar.launch.channel import ChannelClosed, ChannelFrame, FrameKind
from patchpar.launch.devices import available_cores
from patchpar.launch.fork_guard import no_fork
from patchpar.launch.handshake import (
    PACKAGE_ROOT,
    GroupStore,
    Inherited,
    WorkerConfig,
    needs_group,
    threads_per_rank,
    worker_environment,
)
from patchpar.launch.messages import encode
from patchpar.launch.process import WorkerProcess, WorkerStart
from patchpar.launch.rank_process import RankProcess
from patchpar.launch.shared_blocks import SharedBlock
from patchpar.launch.start_method import StartMethodName
from patchpar.launch.started_process import FreshProcess
from patchpar.launch.templates import fork_worker
from patchpar.launch.time_limit import longest_wait
from patchpar.launch.worker_output import FirstPrinter


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPoolSpec:
    """Settings of a pool. Times in seconds.

    `one_by_one`: a worker that is lost can be started without the others, since neither the engine's constructor nor
    the calls that are repeated exchange anything, except those that divide a state. `has_group`: whether ranks with a
    GPU each meet in torch's default group.
    """

    devices: tuple[str, ...]
    engine: str
    deadline: float
    start_timeout: float
    start_method: StartMethodName
    preload: tuple[str, ...]
    one_by_one: bool = False
    has_group: bool = True

    @property
    def needs_group(self) -> bool:
        """Whether the ranks meet in torch's default group."""
        return self.has_group and needs_group(self.devices)

    def config(self, rank: int, store: GroupStore | None, threads: int, inherited: Inherited | None) -> WorkerConfig:
        """Return the first message to a worker. `store`, `inherited`: see WorkerConfig."""
        return WorkerConfig(
            rank=rank,
            world_size=len(self.devices),
            device=self.devices[rank],
            engine=self.engine,
            preload=self.preload,
            deadline=self.deadline,
            start_timeout=self.start_timeout,
            # The caller knows the limit of a call and sees which rank is late, so it has to detect hangs first.
            group_timeout=longest_wait(self.deadline + self.start_timeout),
            threads=threads,
            group_store=store.path if store else None,
            session_key=store.session_key if store else b"",
            inherited=inherited,
        )


class LocalStarter:
    """Starts workers on this machine."""

    def __init__(self, spec: WorkerPoolSpec) -> None:
        self._spec = spec

    def start(self, ranks: Sequence[int], store: GroupStore | None, speakers: FirstPrinter) -> Iterator[WorkerProcess]:
        """See ProcessStarter."""
        spec, world = self._spec, len(self._spec.devices)
        threads = threads_per_rank(available_cores(), world)
        start = WorkerStart(
            starter=fork_worker if spec.start_method == "forkserver" else FreshProcess,
            environment=worker_environment(threads),
            path=_module_path(),
            modules=(spec.engine.partition(":")[0], *spec.preload, *(["torch"] if world > 1 else [])),
            speakers=speakers,
        )
        for rank in ranks:
            worker = WorkerProcess(rank, spec.devices[rank], start, store.inherit if store else ())
            yield worker
            inherited = Inherited(path=start.path, heartbeat=worker.heartbeat_fd, lifeline=worker.lifeline_fd)
            worker.send_config(encode(spec.config(rank, store, threads, inherited)))

    def link(self, one: RankProcess, other: RankProcess) -> None:
        """See ProcessStarter: the ends of a socket pair."""
        with no_fork():  # a child's copy of an end would keep the connection open
            ends = socket.socketpair()
            for worker, peer, end in ((one, other, ends[0]), (other, one, ends[1])):
                message = replace(encode(peer.rank), block=SharedBlock(end.detach(), 0))
                with contextlib.suppress(ChannelClosed, TimeoutError):  # noticed when the request is sent
                    worker.channel.send(ChannelFrame(FrameKind.LINK, 0, message))
                message.close()


def _module_path() -> tuple[str, ...]:
    """Return where workers look for modules: where this process does, which passes over entries that are no text."""
    path = [each for each in sys.path if isinstance(each, str)]
    return tuple(path) if PACKAGE_ROOT in path else (*path, PACKAGE_ROOT)
