"""A plain pool of gloo processes with the `call` of a launched executor."""

from __future__ import annotations

import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass
class Context:
    rank: int
    world_size: int
    device: str = "cpu"
    deadline: float = 30.0

    def emit(self, event: object) -> None: ...
    def ask(self, question: object) -> Any: ...
    def mark(self, where: str) -> None: ...


def _serve(rank: int, size: int, folder: str, calls: Any, results: Any) -> None:
    from tests.ranks import Ranks

    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/s", size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    engine = Ranks(Context(rank, size))
    while (call := calls.get()) is not None:
        method, args = call
        try:
            results.put((rank, True, getattr(engine, method)(*args)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))


class Pool:
    def __init__(self, size: int) -> None:
        self.size, self.folder = size, tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.calls = [context.Queue() for _ in range(size)]
        self.processes = [
            context.Process(
                target=_serve, args=(rank, size, self.folder.name, self.calls[rank], self.results), daemon=True
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Pool:
        return self

    def call(self, method: str, *args: Any) -> list[Any]:
        for queue in self.calls:
            queue.put((method, args))
        got: list[Any] = [None] * self.size
        errors = []
        for _ in range(self.size):
            rank, good, value = self.results.get(timeout=200)
            if not good:
                errors.append(f"rank {rank}:\n{value}")
            got[rank] = value
        if errors:
            raise RuntimeError("\n".join(errors))
        return got

    def __exit__(self, *_: object) -> None:
        for queue in self.calls:
            queue.put(None)
        for process in self.processes:
            process.join(10)
        Path(self.folder.name)
