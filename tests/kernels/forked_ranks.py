"""Ranks that are forked from a process in which Triton interprets, and write each other's memory."""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.transport import symmetric_memory
from patchpar.comm.transport.message import FlatParts
from patchpar.comm.transport.symmetric_memory import MappedMemory, PeerMemory

GIVE_UP = 5.0  # seconds, where a test waits for what never comes


def run_forked(function: Any, world: int, *args: Any) -> list[Any]:
    """What `function(peers, rank, world, *args)` returns on each rank."""
    memories = [torch.zeros(PeerMemory.bytes_for(world), dtype=torch.uint8).share_memory_() for _ in range(world)]
    addresses = [memory.data_ptr() for memory in memories]
    pipes, children = [os.pipe() for _ in range(world)], []
    for rank in range(world):
        child = os.fork()
        if not child:
            _live(
                function,
                PeerMemory(MappedMemory(memories[rank], addresses, None), rank),
                rank,
                world,
                args,
                pipes[rank][1],
            )
        children.append(child)
    found = []
    for (reading, writing), child in zip(pipes, children, strict=True):
        os.close(writing)
        with os.fdopen(reading, "rb") as stream:
            found.append(pickle.loads(stream.read()))
        os.waitpid(child, 0)
    return found


def _live(function: Any, peers: PeerMemory, rank: int, world: int, args: Any, writing: int) -> None:
    symmetric_memory.CHUNKS = 2  # programs of a pair, which are interpreted one after the other
    try:
        found = function(peers, rank, world, *args)
    except BaseException:  # noqa: BLE001 - the test shows it
        found = traceback.format_exc()
    with os.fdopen(writing, "wb") as stream:
        stream.write(pickle.dumps(found))
    os._exit(0)


def values(sender: int, receiver: int, number: int, count: int, dtype: torch.dtype) -> Tensor:
    """What one rank sends another in an exchange."""
    return (torch.arange(count) % 13 + 100 * sender + 10 * receiver + number).to(dtype)


def part(sender: int, receiver: int, number: int) -> int:
    """How many elements that is: none now and then, and more than all programs copy at once."""
    return (0, 1, 7, 40, 9000)[(3 * sender + receiver + number) % 5]


def rounds(peers: PeerMemory, rank: int, world: int, dtype: torch.dtype, count: int) -> list[int]:
    """Exchanges of uneven parts, one after the other, at each rank's own pace; the numbers of those that are wrong."""
    wrong = []
    for number in range(count):
        time.sleep(0.01 * ((rank + number) % 3))
        sent = [part(rank, peer, number) for peer in range(world)]
        received = [part(peer, rank, number) for peer in range(world)]
        own = torch.cat([values(rank, peer, number, size, dtype) for peer, size in enumerate(sent)])
        into = torch.zeros(sum(received), dtype=dtype)
        peers.all_to_all(FlatParts(own, sent), FlatParts(into, received))
        want = torch.cat([values(peer, rank, number, size, dtype) for peer, size in enumerate(received)])
        if not torch.equal(into, want):
            wrong.append(number)
        rows = torch.zeros(world, 5, dtype=dtype)
        rows[rank] = values(rank, 0, number, 5, dtype)
        peers.all_gather(rows[rank], rows)
        if not torch.equal(rows, torch.stack([values(peer, 0, number, 5, dtype) for peer in range(world)])):
            wrong.append(-number - 1)
    return wrong


def unread_rounds(peers: PeerMemory, rank: int, world: int) -> list[int]:
    """The same without what the others write: each rank has its own memory only."""
    own = peers._mapped.memory.clone()
    peers._addresses[:] = torch.tensor([own.data_ptr()] * world)
    threading.Timer(0.5, peers.give_up).start()
    return rounds(peers, rank, world, torch.int32, 1)


def alone(peers: PeerMemory, rank: int, world: int) -> float:
    """Seconds that a rank takes for an exchange in which the others have no part, once it gives up."""
    if rank:
        return 0.0
    start = time.monotonic()
    threading.Timer(0.3, peers.give_up).start()
    peers.all_gather(torch.ones(3), torch.zeros(world, 3))
    return time.monotonic() - start
