"""What the ranks of the tests of collectives run, over messages and over operations of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.exchange_part import ExchangePart, edges_part, moments_part, stacked_moments
from patchpar.comm.transport import FlatParts, TensorSpec
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.plan.mesh import Axis, rank_sets
from patchpar.shard.attention.ring import attend_in_ring
from patchpar.shard.attention.sharded_qkv import ShardedQKV
from tests.ranks import DEADLINE, PoolRank

HALVES = {"patch": 2, "cfg": 2}


def over_torch(this: PoolRank, *, collective: bool) -> tuple[Communicator, TorchTransport]:
    """A communicator over gloo along `HALVES`; if `collective`, as with NCCL one operation for all ranks of an axis."""
    transport = TorchTransport(this.transport.device, DEADLINE, collective=collective)
    assert (transport.collectives is not None) == collective, "else messages are compared with messages"
    if transport.collectives is not None:
        transport.collectives.form(rank_sets(range(this.world), **HALVES))
    return Communicator(transport), transport


def values_of(rank: int, rows: int) -> list[Tensor]:
    """Keys, values and more of one rank: several dtypes, one of them of an odd number of bytes."""
    generator = torch.Generator().manual_seed(rank)
    keys = torch.randn(2, rows, 3, generator=generator)
    return [keys, keys.transpose(0, 1).half(), keys > 0, keys[0, :, :1].double()]


def gathers(this: PoolRank, collective: bool, uneven: bool) -> dict[str, Any]:
    """All gathers along both axes of a mesh; what came, and what was counted."""
    comm, transport = over_torch(this, collective=collective)
    mesh = this.mesh(**HALVES)
    found: dict[str, Any] = {}
    for name in HALVES:
        axis = mesh[name]
        rows = {rank: 2 + rank * uneven for rank in axis.ranks}
        found[name] = [*_gathered(comm, axis, rows), _all_to_all(comm, axis, uneven)]
    found["bytes"] = dict(comm.traffic.bytes_sent), dict(comm.traffic.bytes_received)
    found["rounds"] = dict(comm.traffic.rounds)
    transport.close()
    return found


def _gathered(comm: Communicator, axis: Axis, rows: dict[int, int]) -> list[Any]:
    own = values_of(axis.ranks[axis.rank], rows[axis.ranks[axis.rank]])

    def specs(group_rank: int) -> list[TensorSpec]:
        return [TensorSpec.of(x) for x in values_of(axis.ranks[group_rank], rows[axis.ranks[group_rank]])]

    started = [AllGather(comm, axis, "kv", "attn1").start(own, specs) for _ in range(2)]
    nearest = [tensors[0] for tensors in started[1].arriving()]
    equal = values_of(axis.ranks[axis.rank], 2)
    stacked = [comm.all_gather(axis, "moments", "norm1", x) for x in equal]
    buffer = equal[0].new_zeros((1 + axis.size, *equal[0].shape))[1:]
    buffer[axis.rank] = equal[0]
    in_place = comm.all_gather(axis, "moments", "norm1", buffer[axis.rank], into=buffer)
    assert in_place.wait().data_ptr() == buffer.data_ptr()
    stacked[0] = in_place
    same = AllGather(comm, axis, "tokens", "norm2").same(equal[1])
    return [started[1].wait(), started[0].wait(), nearest, [work.wait() for work in stacked], same]


def rings(this: PoolRank, collective: bool, uneven: bool) -> dict[str, Any]:
    """Attention by a ring one way, along both axes and all ranks; what came, and what was counted."""
    comm, transport = over_torch(this, collective=collective)
    mesh = this.mesh(**HALVES)
    if collective:  # a round is one operation, and not messages
        transport.send_recv = None  # type: ignore[assignment]
    found: dict[str, Any] = {}
    for name, axis in (*((name, mesh[name]) for name in HALVES), ("both", mesh.of_one_image())):
        sizes = tuple(2 + rank * uneven for rank in range(axis.size))
        values = (torch.randn(1, 2, sum(sizes), 8, generator=torch.Generator().manual_seed(7)) for _ in range(3))
        start = sum(sizes[: axis.rank])
        q, k, v = (x[:, :, start : start + sizes[axis.rank]] for x in values)
        shared = ShardedQKV(q_BNlD=q, k_BMlD=k, v_BMlD=v, sizes=sizes, group_rank=axis.rank)
        found[name] = attend_in_ring(comm, axis, "attn1", shared)
    found["bytes"] = dict(comm.traffic.bytes_sent), dict(comm.traffic.bytes_received)
    found["rounds"] = dict(comm.traffic.rounds)
    transport.close()
    return found


def _all_to_all(comm: Communicator, axis: Axis, uneven: bool) -> Tensor:
    """Each rank sends to each its own number and the receiver's, one time more for every rank on if `uneven`."""
    ranks, mine = range(axis.size), axis.rank
    own = [torch.tensor([10.0 * mine + other] * (2 + other * uneven)) for other in ranks]
    size = 2 + mine * uneven
    into = FlatParts(torch.zeros(size * axis.size), (size,) * axis.size)
    sent = FlatParts(torch.cat(own), tuple(len(x) for x in own))
    found = comm.all_to_all(axis, "heads", "attn1", sent, into).wait()
    assert found.tolist() == [10.0 * other + mine for other in ranks for _ in range(size)]
    return found


def edges(this: PoolRank, collective: bool, before: int, after: int) -> dict[str, Any]:
    """Rounds of halo rows, alone and with moments, along both axes: in half precision beside single precision."""
    comm, transport = over_torch(this, collective=collective)
    mesh = this.mesh(**HALVES)
    found: dict[str, Any] = {}
    for axis in (*(mesh[name] for name in HALVES), mesh.of_one_image()):
        own = values_of(axis.ranks[axis.rank], 3)[1]
        part = _edges_of(axis, own, before, after)
        moments = [torch.full((3,), float(axis.rank)), torch.tensor(axis.rank)]
        works = [
            comm.gather_with_edges(axis, "norm1", moments, part),
            comm.gather_with_edges(axis, "conv1", [], part),
            comm.gather_with_edges(axis, "norm2", moments[:1], None),
        ]
        rows, halo = comm.gather_moments(axis, "norm3", moments[0], part).wait()
        bulk = comm.exchange("bucket", [part, moments_part(axis, moments), part], bulk=True)
        found[f"{axis.name} {axis.size}"] = [work.wait() for work in reversed(works)], bulk.wait()
        found[f"{axis.name} {axis.size}, moments"] = stacked_moments(rows, 3), halo
    found["bytes"] = dict(comm.traffic.bytes_sent), dict(comm.traffic.bytes_received)
    found["rounds"] = dict(comm.traffic.rounds)
    transport.close()
    return found


def pieces(this: PoolRank, collective: bool, width: int) -> dict[str, Any]:
    """Stale tokens in pieces: two near ones to a neighbour and one average to every rank, in two steps.

    Received into a buffer that these fill, or beside this rank's own; tokens of `width` numbers in half precision.
    """
    comm, transport = over_torch(this, collective=collective)
    axis = this.mesh(**HALVES).of_one_image()
    found: dict[str, Any] = {}
    for name, num_own in (("fills", 0), ("beside its own", 3)):
        num_tokens, memory = num_own + sum(_num_tokens(axis, other) for other in axis.others), MessageMemory()
        buffer = torch.zeros(num_tokens, width).half()
        for step in range(2):
            part = _pieces_of(axis, buffer, num_own, step)
            (received,) = comm.exchange("attn1", [part], bulk=True, memory=memory).wait()
            assert all(
                x.data_ptr() == own.data_ptr()
                for peer, tensors in part.into.items()
                for own, x in zip(tensors, received[peer], strict=True)
            )
            found[f"{name}, step {step}"] = buffer.clone()
        in_place = not num_own and width % 8 == 0  # else bytes that align a message lie between them
        assert len(memory.tensors()) == (2 - in_place if collective else 0)
    found["bytes"] = dict(comm.traffic.bytes_sent), dict(comm.traffic.bytes_received)
    transport.close()
    return found


def _num_tokens(axis: Axis, other: int) -> int:
    """Tokens that this rank and another send each other."""
    return 3 if abs(axis.rank - other) == 1 else 1


def _pieces_of(axis: Axis, buffer: Tensor, num_own: int, step: int) -> ExchangePart:
    outgoing, into, start = list[Any](), dict[int, tuple[Tensor, ...]](), 0
    for other in range(axis.size):
        if other == axis.rank:
            start += num_own
            continue
        sizes = (2, 1) if _num_tokens(axis, other) > 1 else (1,)
        values = torch.arange(sum(sizes) * buffer.shape[1]).view(-1, buffer.shape[1]).half()
        values += 100 * axis.rank + 10 * other + 1000 * step
        outgoing.append(((axis.ranks[other],), values.split_with_sizes(sizes)))
        into[axis.ranks[other]] = tuple(buffer.narrow(0, start + 2 * index, size) for index, size in enumerate(sizes))
        start += sum(sizes)
    specs = {rank: tuple(map(TensorSpec.of, tensors)) for rank, tensors in into.items()}
    return ExchangePart("kv", outgoing, specs, into, axis, at_once=True, whole=None if num_own else buffer)


def _edges_of(axis: Axis, own: Tensor, before: int, after: int) -> ExchangePart:
    """What `LocalPatch.edges` makes of a layer that reads `before` and `after` rows beyond its band [h, C, W]."""
    up, down = axis.rank > 0, axis.rank + 1 < axis.size
    specs = [TensorSpec((rows, *own.shape[1:]), own.dtype) if rows else None for rows in (before, after)]
    first, last = own[:after] if up and after else None, own[len(own) - before :] if down and before else None
    return edges_part(axis, first, last, specs[0] if up else None, specs[1] if down else None)
