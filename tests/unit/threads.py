"""Ranks as threads of this process: real transports over real sockets, without starting workers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import torch

from patchpar.comm.transport.shared_memory import SharedMemoryTransport


def connected(world: int, *, deadline: float = 10.0) -> list[SharedMemoryTransport]:
    """One transport per rank, each connected with all others. Close them."""
    links: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for one, other in combinations(range(world), 2):
        links[one][other], links[other][one] = socket.socketpair(socket.AF_UNIX)
    return [SharedMemoryTransport(rank, links[rank], torch.device("cpu"), deadline) for rank in range(world)]


def on_threads(world: int, function: Callable[..., Any], *args: Any, deadline: float = 10.0) -> list[Any]:
    """What `function(transport, *args)` returns, or the error it raises, on each of `world` ranks."""
    transports = connected(world, deadline=deadline)

    def run(transport: SharedMemoryTransport) -> Any:
        try:
            return function(transport, *args)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    try:
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(run, transports))
    finally:
        for transport in transports:
            transport.close()
