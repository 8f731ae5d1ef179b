"""Exchanges between ranks that are threads: gathers, rounds, and what the door counts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.exchange_part import ExchangeScope, edges_part, moments_part, start_messages
from patchpar.comm.transport import Incoming, Messages, Outgoing, TensorSpec, Work
from patchpar.plan.mesh import Axis, Mesh
from tests.unit.threads import on_threads

SIZES = (3, 1, 4, 2)


def along(world: int, function: Callable[[Communicator, Axis], Any]) -> list[Any]:
    """What `function(comm, axis)` returns on each rank of one axis."""

    def run(transport: Any) -> Any:
        return function(Communicator(transport), Mesh(transport.rank, range(world), patch=world)["patch"])

    found = on_threads(world, run)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def part(group_rank: int, rows: int = 2) -> Tensor:
    return torch.arange(rows * 5, dtype=torch.float32).view(1, rows, 5) + 100 * group_rank


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gather_gives_every_part_in_order(world: int) -> None:
    def run(comm: Communicator, axis: Axis) -> tuple[list[Tensor], int]:
        return AllGather(comm, axis, "kv", "here").same(part(axis.rank)), comm.traffic.total_bytes

    for received, num_bytes in along(world, run):
        assert [torch.equal(x, part(group_rank)) for group_rank, x in enumerate(received)] == [True] * world
        assert num_bytes == (world - 1) * 40


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equal_parts_come_stacked(world: int) -> None:
    def run(comm: Communicator, axis: Axis) -> tuple[Tensor, int, int]:
        found = comm.all_gather(axis, "kv", "here", part(axis.rank).transpose(1, 2)).wait()
        return found, comm.traffic.bytes_sent["kv"], comm.traffic.bytes_received["kv"]

    wanted = torch.stack([part(group_rank).transpose(1, 2) for group_rank in range(world)])
    for received, *num_bytes in along(world, run):
        assert torch.equal(received, wanted)
        assert num_bytes == [(world - 1) * 40] * 2


@pytest.mark.parametrize(
    ("sizes", "bulk", "way"),
    [((2, 2), True, "gather"), ((9, 1), True, "exchange of bulk"), ((9, 1), False, "messages")],
)
def test_uneven_parts_for_the_next_step_do_not_queue_before_those_of_this_one(
    sizes: tuple[int, int], bulk: bool, way: str
) -> None:
    """Messages of their own go through the groups of what this step needs."""
    collectives: Any = SimpleNamespace(
        covers=lambda ranks: True,
        gather_messages=lambda *_, bulk: "gather",
        exchange=lambda *_, bulk, memory: f"exchange{' of bulk' * bulk}",
    )
    transport: Any = SimpleNamespace(collectives=collectives, send_recv=lambda *_: "messages")
    axis = Mesh(0, range(2), patch=2)["patch"]
    own, other = (part(rank, rows) for rank, rows in enumerate(sizes))
    outgoing, incoming = [Outgoing((1,), (own,))], [Incoming(1, (TensorSpec.of(other),))]
    scope = ExchangeScope(axis, to_all=True, bulk=bulk)
    assert start_messages(transport, "here", outgoing, incoming, scope) == way


@pytest.mark.parametrize("dim", [1, -2])
def test_parts_of_different_size(dim: int) -> None:
    def run(comm: Communicator, axis: Axis) -> list[Tensor]:
        return AllGather(comm, axis, "prediction", "here").parts(part(axis.rank, SIZES[axis.rank]), dim, SIZES)

    for received in along(4, run):
        wanted = [part(group_rank, rows) for group_rank, rows in enumerate(SIZES)]
        assert [torch.equal(got, want) for got, want in zip(received, wanted, strict=True)] == [True] * 4


def test_the_nearest_part_comes_first() -> None:
    def run(comm: Communicator, axis: Axis) -> list[int]:
        own = [part(axis.rank), part(axis.rank)]
        gathering = AllGather(comm, axis, "kv", "here").start(own, lambda _: [TensorSpec.of(x) for x in own])
        arriving = zip(axis.others, gathering.arriving(), strict=True)
        return [
            group_rank for group_rank, tensors in arriving if all(torch.equal(x, part(group_rank)) for x in tensors)
        ]

    assert along(4, run) == [[1, 2, 3], [0, 2, 3], [1, 3, 0], [2, 1, 0]]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 0), (0, 1), (0, 0)])
def test_a_round_brings_moments_of_all_and_rows_of_neighbours(world: int, before: int, after: int) -> None:
    def run(comm: Communicator, axis: Axis) -> tuple[Any, int]:
        x, moments = part(axis.rank, 4), torch.full((3,), float(axis.rank))
        first = x[:, :after] if axis.rank > 0 and after else None
        last = x[:, 4 - before :] if axis.rank + 1 < world and before else None
        above = TensorSpec((1, before, 5), x.dtype) if axis.rank > 0 and before else None
        below = TensorSpec((1, after, 5), x.dtype) if axis.rank + 1 < world and after else None
        pending = comm.gather_with_edges(axis, "norm1", [moments], edges_part(axis, first, last, above, below))
        return pending.wait(), comm.traffic.total_bytes

    for group_rank, ((shared, (above, below)), num_bytes) in enumerate(along(world, run)):
        assert {other: values[0][0].item() for other, values in shared.items()} == {
            other: float(other) for other in range(world) if other != group_rank
        }
        assert (above is not None) == bool(group_rank > 0 and before)
        assert (below is not None) == bool(group_rank + 1 < world and after)
        if above is not None:
            assert torch.equal(above, part(group_rank - 1, 4)[:, 4 - before :])
        if below is not None:
            assert torch.equal(below, part(group_rank + 1, 4)[:, :after])
        rows = after * (group_rank > 0) + before * (group_rank + 1 < world)
        assert num_bytes == (world - 1) * 12 + rows * 20


def test_a_round_of_rows_alone_leaves_the_others_in_peace() -> None:
    def run(comm: Communicator, axis: Axis) -> tuple[Any, int]:
        x = part(axis.rank)
        spec = TensorSpec((1, 1, 5), x.dtype)
        first, above = (x[:, :1], spec) if axis.rank > 0 else (None, None)
        last, below = (x[:, 1:], spec) if axis.rank < 3 else (None, None)
        pending = comm.gather_with_edges(axis, "conv", [], edges_part(axis, first, last, above, below))
        return pending.wait()[1], comm.traffic.total_bytes

    for group_rank, ((above, below), num_bytes) in enumerate(along(4, run)):
        assert above is None if group_rank == 0 else torch.equal(above, part(group_rank - 1)[:, 1:])
        assert below is None if group_rank == 3 else torch.equal(below, part(group_rank + 1)[:, :1])
        assert num_bytes == (1 if group_rank in (0, 3) else 2) * 20


def test_one_rank_to_another_and_what_the_communicator_counts() -> None:
    def run(comm: Communicator, axis: Axis) -> Any:
        x = part(0)
        if axis.rank == 0:
            comm.send("branch", "guidance", [1, 2], [x]).wait()
        else:
            (received,) = comm.receive("branch", "guidance", 0, [TensorSpec.of(x)]).wait()
            assert torch.equal(received[0], x)
        counted = dict(comm.traffic.bytes_sent), dict(comm.traffic.rounds), set(comm.traffic.seconds_waited)
        comm.traffic.clear()
        assert comm.traffic.total_bytes == 0
        return counted

    sender, *receivers = along(3, run)
    assert sender == ({"branch": 2 * 40}, {"branch": 1}, {"branch"})
    assert receivers == [({"branch": 0}, {"branch": 1}, {"branch"})] * 2


def test_the_communicator_says_where_it_is() -> None:
    def run(transport: Any) -> list[str]:
        seen: list[str] = []
        axis = Mesh(transport.rank, range(2), patch=2)["patch"]
        AllGather(Communicator(transport, seen.append), axis, "kv", "mid_block.attn1").same(part(0))
        return seen

    assert on_threads(2, run) == [["mid_block.attn1"]] * 2


def test_one_handle_from_the_transport_to_whoever_waits() -> None:
    """Whatever is started, what is waited for is what the transport made, and nothing wraps it."""

    def run(comm: Communicator, axis: Axis) -> list[bool]:
        made: list[Work[Messages]] = []
        transport, send_recv = comm.transport, comm.transport.send_recv

        def noted(outgoing: Any, incoming: Any, where: str) -> Work[Messages]:
            made.append(send_recv(outgoing, incoming, where))
            return made[-1]

        transport.send_recv = noted  # type: ignore[method-assign]
        x, spec = part(axis.rank), TensorSpec.of(part(0))
        ours = {"last": x[:, 1:]} if axis.rank == 0 else {"before": TensorSpec((1, 1, 5), x.dtype)}
        edges = edges_part(axis, **ours)  # type: ignore[arg-type]
        started: list[Work[Any]] = [
            comm.gather_with_edges(axis, "norm1", [x], edges),
            AllGather(comm, axis, "kv", "attn1").start([x], lambda _: [spec]),
            comm.exchange("bucket", [moments_part(axis, [x])]),
            comm.send("result", "vae", [1], [x]) if axis.rank == 0 else comm.receive("result", "vae", 0, [spec]),
        ]
        for work in started:
            assert work.wait() is work.wait()
        return [work is own for work, own in zip(started, made, strict=True)]

    assert along(2, run) == [[True] * 4] * 2


def test_a_message_is_waited_for_and_counted_once() -> None:
    """However often its handle is asked for it."""

    def run(comm: Communicator, axis: Axis) -> int:
        x = part(axis.rank)
        comm.traffic.events = []
        work = AllGather(comm, axis, "kv", "attn1").start([x], lambda _: [TensorSpec.of(x)])
        work.wait_for(0)
        assert torch.equal(work.wait_for(0)[0], part(1 - axis.rank))
        waits = [event for event in comm.traffic.events if event.what == "wait"]
        assert [torch.equal(found, part(group_rank)) for group_rank, (found,) in enumerate(work.wait())] == [True, True]
        return len(waits)

    assert along(2, run) == [1, 1]
