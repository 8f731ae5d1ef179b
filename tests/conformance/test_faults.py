"""Seeded faults that the checker of NCCL's rules has to refuse, each beside the same exchange without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.exchange_part import ExchangePart, moments_part
from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, Work
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.comm.transport.torch_work import TorchWork
from patchpar.errors import ExchangeError
from patchpar.plan.mesh import Axis, Mesh
from tests.conformance.stand_in import StandIn
from tests.conformance.turns import Deadlock

WORLD = 3
SPEC = TensorSpec((2, 3), torch.float32)
Start = Callable[[Communicator, Axis, str, Tensor], Work[Any]]


def own(rank: int) -> Tensor:
    return torch.full(SPEC.shape, float(rank))


def gathered(comm: Communicator, axis: Axis, where: str, x: Tensor) -> Work[Any]:
    """An all-gather of equal shares."""
    return AllGather(comm, axis, "kv", where).start([x, x.half()], lambda _: [SPEC, TensorSpec(SPEC.shape, torch.half)])


def single(comm: Communicator, axis: Axis, where: str, x: Tensor) -> Work[Any]:
    """A single tensor, which is sent from where it is."""
    return comm.all_gather(axis, "kv", where, x)


def ring(comm: Communicator, axis: Axis, where: str, x: Tensor) -> Work[Any]:
    """Messages to one neighbour and from the other."""
    after, before = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    return comm.send_recv("kv", where, [Outgoing((after,), (x,))], [Incoming(before, (SPEC,))])


def rounds(comm: Communicator, axis: Axis, where: str, x: Tensor) -> Work[Any]:
    """Moments to all, and something to the next rank only, in one exchange."""
    to, sender = [((rank,), (x,)) for rank in [axis.after] if rank is not None], axis.before
    part = ExchangePart("halo", to, {} if sender is None else {sender: (SPEC,)}, axis=axis)
    return comm.exchange(where, [moments_part(axis, [x.double()]), part])


def bulk(comm: Communicator, axis: Axis, where: str, x: Tensor) -> Work[Any]:
    """What the next step needs."""
    return comm.exchange(where, [moments_part(axis, [x])], bulk=True)


WAYS = pytest.mark.parametrize("start", [gathered, ring, rounds, bulk], ids=lambda start: start.__name__)


def checked(function: Callable[[Communicator, Axis, StandIn], Any], world: int = WORLD) -> tuple[list[Any], list[str]]:
    """What `function` returns or raises on each rank, and the faults that were found."""
    stand_in = StandIn(world)

    def run(transport: TorchTransport) -> Any:
        axis = Mesh(transport.rank, range(world), patch=world)["patch"]
        return function(Communicator(transport), axis, stand_in)

    return stand_in.run(run), stand_in.faults


def is_stuck(error: Any) -> bool:
    """Whether a rank waited for what nobody sends: with NCCL until its deadline."""
    return isinstance(error, ExchangeError) and isinstance(error.__cause__, Deadlock)


def in_order(start: Start, orders: Sequence[Sequence[str]]) -> tuple[list[Any], list[str]]:
    """Exchanges begun by each rank in its order, then awaited."""

    def run(comm: Communicator, axis: Axis, _: StandIn) -> None:
        for work in [start(comm, axis, where, own(axis.rank)) for where in orders[axis.rank]]:
            work.wait()

    return checked(run, len(orders))


@WAYS
def test_the_same_order_on_all_ranks_is_right(start: Start) -> None:
    assert in_order(start, [["norm1", "attn1"]] * WORLD) == ([None] * WORLD, [])


@WAYS
def test_swapped_order(start: Start) -> None:
    """Of equal sizes NCCL would not notice, and bring the values of another exchange point."""
    _, faults = in_order(start, [["norm1", "attn1"], ["attn1", "norm1"], ["norm1", "attn1"]])
    assert faults
    assert all("operations of different exchange points meet" in fault for fault in faults)


@WAYS
def test_missing_send(start: Start) -> None:
    found, faults = in_order(start, [["norm1", "attn1"], ["norm1"], ["norm1", "attn1"]])
    assert any(is_stuck(each) for each in found)
    assert any("not carried out at the end" in fault and "attn1" in fault for fault in faults)


def test_a_rank_that_thinks_it_has_no_part_in_an_exchange() -> None:
    """The last rank sends nothing and could leave an operation of all ranks out, as if it were messages."""

    def run(comm: Communicator, axis: Axis, _: StandIn) -> None:
        to = [((axis.after,), (own(axis.rank),))] if axis.rank == 0 else []
        part = ExchangePart("halo", to, {0: (SPEC,)} if axis.rank == 1 else {}, axis=axis)
        if axis.rank < skipping:
            comm.exchange("conv1", [part]).wait()

    skipping = WORLD
    assert checked(run) == ([None] * WORLD, [])
    skipping = WORLD - 1
    found, faults = checked(run)
    assert is_stuck(found[0])
    assert any("not carried out" in fault for fault in faults)


def test_another_size_on_one_side() -> None:
    def run(comm: Communicator, axis: Axis, _: StandIn) -> None:
        x = own(axis.rank)[: 1 if axis.rank == 1 else 2]
        comm.send_recv(
            "kv",
            "attn1",
            [Outgoing((axis.ranks[(axis.rank + 1) % 3],), (x,))],
            [Incoming(axis.ranks[axis.rank - 1], (SPEC,))],
        ).wait()

    _, faults = checked(run)
    assert any("12 bytes are sent where 24 are received" in fault for fault in faults)


@pytest.mark.parametrize("start", [single, ring], ids=lambda start: start.__name__)
@pytest.mark.parametrize("too_early", [False, True])
def test_early_reuse_of_what_is_sent(start: Start, too_early: bool) -> None:
    def run(comm: Communicator, axis: Axis, _: StandIn) -> None:
        x = own(axis.rank)
        work = start(comm, axis, "attn1", x)
        if not too_early:
            work.wait()
        x.add_(1)
        work.wait()

    _, faults = checked(run)
    assert bool(faults) == too_early
    assert all("aten.add_.Tensor writes to a buffer being sent" in fault for fault in faults)


@pytest.mark.parametrize("too_early", [False, True])
def test_early_use_of_what_is_received(too_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a transport that does not wait."""
    if too_early:
        monkeypatch.setattr(TorchWork, "_leave", lambda _: None)

    def run(comm: Communicator, axis: Axis, _: StandIn) -> None:
        comm.all_gather(axis, "kv", "attn1", own(axis.rank)).wait().sum()

    _, faults = checked(run)
    assert any("aten.sum.default on stream main uses a buffer being received" in fault for fault in faults) == too_early
    assert bool(faults) == too_early


@pytest.mark.parametrize("other", [False, True])
def test_second_thread(other: bool) -> None:
    def run(comm: Communicator, axis: Axis, stand_in: StandIn) -> None:
        ring(comm, axis, "norm1", own(axis.rank)).wait()
        if not other:
            ring(comm, axis, "attn1", own(axis.rank)).wait()
            return
        works: list[Work[Any]] = []
        rank, guard = stand_in.rank.number, stand_in.rank.guard

        def begin() -> None:
            stand_in.rank.number, stand_in.rank.guard = rank, guard
            works.append(ring(comm, axis, "attn1", own(axis.rank)))

        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        works[0].wait()

    _, faults = checked(run)
    assert bool(faults) == other
    assert all("posted on a second thread" in fault for fault in faults)


@pytest.mark.parametrize(("begun", "awaited", "read", "message"), [
    ("main", "main", "main", ""),
    ("side", "side", "side", ""),
    ("main", "main", "side", "aten.add.Tensor on stream side uses a buffer received on ['main']"),
    ("side", "main", "main", "started on stream side, awaited on main"),
])  # fmt: skip
def test_wrong_stream(begun: str, awaited: str, read: str, message: str) -> None:
    def run(comm: Communicator, axis: Axis, stand_in: StandIn) -> None:
        guard = stand_in.rank.guard
        guard.stream = begun
        work = gathered(comm, axis, "attn1", own(axis.rank))
        guard.stream = awaited
        found = work.wait()
        guard.stream = read
        found[axis.others[0]][0] + 1

    _, faults = checked(run)
    assert bool(faults) == bool(message)
    assert all(message in fault for fault in faults)


@pytest.mark.parametrize("start", [gathered, ring], ids=lambda start: start.__name__)
@pytest.mark.parametrize("dropped", [False, True])
def test_a_buffer_that_is_freed_before_it_has_been_sent(
    start: Start, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a transport that keeps the works, but not what they send; the packed copy is nobody else's."""
    init = TorchWork.__init__

    def forgetful(work: Any, transport: Any, works: Any, buffers: Any, *rest: Any) -> None:
        init(work, transport, works, ((), buffers[1]) if dropped else buffers, *rest)

    monkeypatch.setattr(TorchWork, "__init__", forgetful)

    def run(comm: Communicator, axis: Axis, _: StandIn) -> None:
        start(comm, axis, "attn1", own(axis.rank)[:, ::2].repeat(1, 2)[:, :3]).wait()

    _, faults = checked(run)
    assert bool(faults) == dropped
    assert all("its sent buffer has been freed" in fault for fault in faults)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_message_that_nobody_waits_for(forgotten: bool) -> None:
    def run(comm: Communicator, axis: Axis, _: StandIn) -> Work[Any]:
        work = bulk(comm, axis, "attn1", own(axis.rank))
        if not forgotten or axis.rank:
            work.wait()
        return work

    _, faults = checked(run)
    assert bool(faults) == forgotten
    assert all("never awaited: rank 0 at attn1" in fault for fault in faults)


def test_small_rounds_overtake_bulk() -> None:
    """Bulk that one rank has not sent yet holds up no exchange of this step; in one queue it would."""

    def run(comm: Communicator, axis: Axis, _: StandIn) -> None:
        if axis.rank:
            work = bulk(comm, axis, "attn1", own(axis.rank))
            rounds(comm, axis, "norm1", own(axis.rank)).wait()
        else:
            rounds(comm, axis, "norm1", own(axis.rank)).wait()
            work = bulk(comm, axis, "attn1", own(axis.rank))
        work.wait()

    assert checked(run) == ([None] * WORLD, [])
