"""What the ranks of the transport tests run."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, Transport
from tests.ranks import PoolRank

LARGE = 72 << 20


def tensors_of(rank: int) -> dict[str, Tensor]:
    """What rank `rank` sends: other values and other shapes on every rank, the same wherever this is called."""
    generator = torch.Generator().manual_seed(rank)
    normal = torch.randn(5 + rank, 7, generator=generator)
    whole = torch.randint(0, 200, (3, 4 + rank), generator=generator)
    return {
        "float32": normal,
        "float16": normal.half(),
        "bfloat16": normal.bfloat16(),
        "float64": normal.double(),
        "int64": whole,
        "uint8": whole.to(torch.uint8),
        "bool": whole > 100,
        "transposed": normal.T,
        "every second column": normal[:, ::2],
        "expanded": normal[:1].expand(6, 7),
        "channels last": torch.randn(1, 4, 3, 2 + rank, generator=generator).to(memory_format=torch.channels_last),
        "scalar": normal[0, 0],
        "no rows": normal[:0],
        "requires grad": normal.clone().requires_grad_(),
    }


def specs_of(tensors: Any) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.of(x) for x in tensors)


def others(transport: Transport, world: int) -> list[int]:
    return [peer for peer in range(world) if peer != transport.rank]


def kinds(this: PoolRank) -> list[str]:
    """Every rank sends tensors of every kind to every other; the kinds that came wrong."""
    own, peers = tensors_of(this.rank), others(this.transport, this.world)
    wrong = []
    for name, x in own.items():
        incoming = [Incoming(peer, specs_of([tensors_of(peer)[name]])) for peer in peers]
        received = this.transport.send_recv([Outgoing(tuple(peers), (x,))], incoming, name).wait()
        for peer, (got,) in zip(peers, received, strict=True):
            sent = tensors_of(peer)[name]
            if got.dtype != sent.dtype or not torch.equal(got, sent.detach()):
                wrong.append(name)
    several = [Incoming(peer, specs_of(tensors_of(peer).values())) for peer in peers]
    received = this.transport.send_recv([Outgoing(tuple(peers), tuple(own.values()))], several, "together").wait()
    for peer, together in zip(peers, received, strict=True):
        if not all(torch.equal(x, y) for x, y in zip(together, tensors_of(peer).values(), strict=True)):
            wrong.append("together")
    return wrong


def many_unread(this: PoolRank, count: int, rows: int) -> bool:
    """Everybody sends `count` messages before anybody reads one; whether they came in order."""
    peers = others(this.transport, this.world)
    pending = []
    for number in range(count):
        x = torch.full((1 + number % rows, 256), float(number))
        incoming = [Incoming(peer, (TensorSpec.of(x),)) for peer in peers]
        pending.append(this.transport.send_recv([Outgoing(tuple(peers), (x,))], incoming, f"message {number}"))
    found = [message.wait() for message in pending]
    return all(
        bool((x == number).all()) and len(x) == 1 + number % rows
        for number, received in enumerate(found)
        for (x,) in received
    )


def large(this: PoolRank) -> bool:
    """A message larger than any segment so far, each way."""
    peer = 1 - this.rank
    x = torch.arange(LARGE // 4, dtype=torch.int32) + this.rank
    ((got,),) = this.transport.send_recv(
        [Outgoing((peer,), (x,))], [Incoming(peer, (TensorSpec.of(x),))], "large"
    ).wait()
    return torch.equal(got, x - this.rank + peer)


def grown(this: PoolRank, count: int) -> dict[str, int]:
    """By how many descriptors and bytes a rank has grown after `count` messages, having warmed up with a quarter."""
    peer = 1 - this.rank

    def exchange(times: int) -> None:
        for number in range(times):
            x = torch.zeros(1 + number % 7, 4096)
            this.transport.send_recv([Outgoing((peer,), (x,))], [Incoming(peer, (TensorSpec.of(x),))], "again").wait()

    exchange(count // 4)
    before = _held()
    exchange(count)
    return {name: value - before[name] for name, value in _held().items()}


def _held() -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"descriptors": len(list(Path("/proc/self/fd").iterdir())), "bytes": pages * os.sysconf("SC_PAGE_SIZE")}


def any_order(this: PoolRank, order: list[int]) -> list[bool]:
    """Exchanges of different size, all begun before the first is awaited, and awaited in `order`."""
    peers = others(this.transport, this.world)
    pending = []
    for number in range(len(order)):
        x = torch.full((2 + number, 3), 10.0 * this.rank + number)
        incoming = [Incoming(peer, (TensorSpec.of(x),)) for peer in peers]
        pending.append(this.transport.send_recv([Outgoing(tuple(peers), (x,))], incoming, f"message {number}"))
    found = []
    for number in order:
        for peer, (x,) in zip(peers, pending[number].wait(), strict=True):
            found.append(torch.equal(x, torch.full((2 + number, 3), 10.0 * peer + number)))
    return found


def put_where_wanted(this: PoolRank) -> dict[str, bool]:
    """Two tensors from every peer, the first into a part of a buffer, not contiguous, the second wherever it likes."""
    peers = others(this.transport, this.world)
    buffer = torch.zeros(2, 4 * this.world, 3)
    parts = {peer: buffer.narrow(1, 4 * peer, 4) for peer in peers}
    own = (torch.full((2, 4, 3), 1.0 + this.rank), torch.full((5,), 10.0 + this.rank))
    incoming = [Incoming(peer, specs_of(own), (parts[peer], None)) for peer in peers]
    pending = this.transport.send_recv([Outgoing(tuple(peers), own)], incoming, "here")
    untouched = not buffer.any()
    received = pending.wait()
    again = pending.wait()
    want = [0.0 if peer == this.rank else 1.0 + peer for peer in range(this.world)]
    return {
        "nothing before it is awaited": untouched,
        "in its place": [buffer[:, 4 * peer : 4 * peer + 4].unique().tolist() for peer in range(this.world)]
        == [[value] for value in want],
        "the very tensor": all(r[0].data_ptr() == parts[p].data_ptr() for p, r in zip(peers, received, strict=True)),
        "the other one anew": all(r[1].unique().item() == 10.0 + p for p, r in zip(peers, received, strict=True)),
        "once": all(x is y for one, two in zip(received, again, strict=True) for x, y in zip(one, two, strict=True)),
    }
