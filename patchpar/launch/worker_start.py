"""Start the processes of a pool's workers."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patchpar.launch.devices import available_cores
from patchpar.launch.executor import longest_wait
from patchpar.launch.handshake import (
    PACKAGE_ROOT,
    GroupStore,
    WorkerConfig,
    needs_group,
    threads_per_rank,
    worker_environment,
)
from patchpar.launch.messages import encode
from patchpar.launch.process import WorkerProcess, WorkerStart
from patchpar.launch.start_method import StartMethodName
from patchpar.launch.started_process import FreshProcess
from patchpar.launch.templates import fork_worker
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


def started(
    spec: WorkerPoolSpec, ranks: Sequence[int], store: GroupStore | None, speakers: FirstPrinter
) -> Iterator[WorkerProcess]:
    """Start workers one after another, and send each its WorkerConfig. Raises LaunchError.

    `store`: where they meet, if they have a default group. `speakers`: see WorkerStart.
    """
    world = len(spec.devices)
    threads = threads_per_rank(available_cores(), world)
    start = WorkerStart(
        starter=fork_worker if spec.start_method == "forkserver" else FreshProcess,
        environment=worker_environment(threads),
        path=tuple(sys.path) if PACKAGE_ROOT in sys.path else (*sys.path, PACKAGE_ROOT),
        modules=(spec.engine.partition(":")[0], *spec.preload, *(["torch"] if world > 1 else [])),
        speakers=speakers,
    )
    for rank in ranks:
        worker = WorkerProcess(rank, spec.devices[rank], start, store.inherit if store else ())
        yield worker
        config = WorkerConfig(
            rank=rank,
            world_size=world,
            device=spec.devices[rank],
            engine=spec.engine,
            preload=spec.preload,
            deadline=spec.deadline,
            # The caller knows the limit of a call and sees which rank is late, so it has to detect hangs first.
            group_timeout=longest_wait(spec.deadline + spec.start_timeout),
            threads=threads,
            path=start.path,
            group_store=store.path if store else None,
            session_key=store.session_key if store else b"",
            heartbeat=worker.heartbeat_fd,
            lifeline=worker.lifeline_fd,
        )
        worker.send_config(encode(config))
