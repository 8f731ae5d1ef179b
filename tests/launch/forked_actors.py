"""Processes that are ranks on nodes, as actors of Ray are, without Ray: each is forked from this one."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from patchpar.launch.network.remote_rank import ReadyRank, RemoteRank, SessionStart
from patchpar.launch.network.remote_worker import RemoteStarter
from patchpar.launch.worker_executor import WorkerExecutor
from patchpar.launch.worker_start import WorkerPoolSpec

HERE = "127.0.0.1"
FORK = multiprocessing.get_context("fork")


def serve(pipe: Connection, node: str) -> None:
    rank = RemoteRank(node, HERE)
    pipe.send(rank.prepare(pipe.recv()))
    rank.serve(*pipe.recv())


class ForkedActor:
    """`alter`: changes what the process is told of the session."""

    def __init__(self, node: str, alter: Callable[[SessionStart], SessionStart]) -> None:
        self.node, self._alter = node, alter
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=serve, args=(theirs, node), daemon=True)
        self._process.start()
        theirs.close()

    def prepare(self, start: SessionStart) -> None:
        self._pipe.send(self._alter(start))

    def ready(self, give_up: float) -> ReadyRank:
        assert self._pipe.poll(give_up - time.monotonic())
        return self._pipe.recv()

    def serve(self, token: bytes, seconds: float) -> None:
        self._pipe.send((token, seconds))

    def has_ended(self) -> bool:
        return not self._process.is_alive()

    def how_it_ended(self) -> str:
        return f"ended with exit code {self._process.exitcode}"

    def kill(self) -> None:
        self._process.kill()


class ForkedActors:
    """`nodes`: of each rank."""

    def __init__(self, nodes: Sequence[str], alter: Callable[[SessionStart], SessionStart] = lambda start: start):
        self.nodes, self.node, self._alter = list(nodes), nodes[0], alter
        self.all: list[ForkedActor] = []

    def start(self, ranks: Sequence[int], give_up: float) -> Mapping[int, ForkedActor]:
        found = {rank: ForkedActor(self.nodes[rank], self._alter) for rank in ranks}
        self.all += found.values()
        return found

    def have_ended(self, within: float = 10.0) -> bool:
        """Whether all that were ever started end by themselves."""
        give_up = time.monotonic() + within
        while not all(actor.has_ended() for actor in self.all):
            if time.monotonic() > give_up:
                return False
            time.sleep(0.02)
        return True


def executor_on(
    actors: ForkedActors, engine: str, *, secret_file: Path | None = None, deadline: float = 2.0
) -> WorkerExecutor:
    devices = ("cpu",) * len(actors.nodes)
    spec = WorkerPoolSpec(
        devices=devices,
        engine=engine,
        deadline=deadline,
        start_timeout=60.0,
        start_method="spawn",
        preload=(),
        one_by_one=True,
    )
    return WorkerExecutor(spec, RemoteStarter(spec, actors, devices, secret_file=secret_file, trusted_network=False))
