"""Small exchanges in symmetric memory: which ones, that they keep the rules, and when NCCL is used instead.

Of the memory there is a stand-in: a communicator of its own. Its kernel has tests in tests/kernels/test_peer_exchange.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import form_groups, symmetric_memory, torch_collectives
from patchpar.comm.transport.message import FlatParts
from patchpar.comm.transport.symmetric_memory import MappedMemory, PeerMemory, formed
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.errors import ExchangeError, PlanError
from patchpar.pipeline.startup import check_request
from patchpar.plan.mesh import Mesh
from tests.breadth import first_of
from tests.conformance.stand_in import RankGroup, StandIn
from tests.conformance.test_strategies import PATIENCE, assert_same, predicted, run_of, sent_late
from tests.unit.threads import on_threads

WORLD = 3


class SimulatedMemory:
    """In the place of `PeerMemory`: the same exchanges, with a communicator of their own."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self.sizes, self.has_given_up = group, list[int](), False

    def all_gather(self, own: Tensor, rows: Tensor) -> Sequence[Any]:
        self.sizes.append(own.nbytes)
        return (self._group.all_gather_single(rows.view(-1), own.view(-1), mock.Mock(asyncOp=True)),)

    def all_to_all(self, own: FlatParts, into: FlatParts) -> Sequence[Any]:
        self.sizes.append(max(own.sizes) * own.buffer.itemsize)
        work = self._group.all_to_all_single(into.buffer, own.buffer, into.sizes, own.sizes, mock.Mock(asyncOp=True))
        return (work,)

    def give_up(self) -> None:
        self.has_given_up = True


def sharing(transport: TorchTransport, stand_in: StandIn, world: int) -> SimulatedMemory:
    """The memory of a rank, in use."""
    collectives: Any = transport.collectives
    ranks = tuple(range(world))
    found = collectives._tried[ranks] = SimulatedMemory(stand_in._new_group(ranks))
    collectives.form([ranks], symmetric_memory=True)
    return found


@pytest.mark.parametrize(
    ("strategy", "world"),
    first_of(
        [(strategy, world) for strategy in ("exact", "exact:ulysses=2", "displaced", "fresh-edges") for world in (2, 4)]
        + [("exact", 3), ("fresh-edges", 3)],
        ("exact", 3),
        ("fresh-edges", 2),
    ),
)
def test_small_exchanges_go_there_and_keep_the_rules(
    strategy: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are too large; uneven bands, so that ranks must agree on what is."""
    monkeypatch.setattr(torch_collectives, "SLOT", 1024)
    stand_in, run = StandIn(world), run_of(strategy)
    memories: list[SimulatedMemory] = []

    def on_rank(transport: TorchTransport) -> Any:
        memories.append(sharing(transport, stand_in, world))
        return predicted(transport, run, world)

    found = stand_in.run(on_rank)
    assert stand_in.faults == []
    with sent_late(run.strategy):
        wanted = on_threads(world, torch.no_grad()(predicted), run, world, deadline=PATIENCE)
    for got, want in zip(found, wanted, strict=True):
        assert_same(got, want)
    sizes = [size for memory in memories for size in memory.sizes]
    assert sizes
    assert max(sizes) <= 1024
    assert len({len(memory.sizes) for memory in memories}) == 1
    assert any(communicator.num_posted for communicator in stand_in.communicators[:2]), "large ones go through NCCL"


def test_without_it_nothing_goes_there() -> None:
    stand_in, used = StandIn(2), []

    def on_rank(transport: TorchTransport) -> None:
        memory, collectives = sharing(transport, stand_in, 2), transport.collectives
        assert collectives is not None
        collectives.form([(0, 1)])
        axis = Mesh(transport.rank, range(2), patch=2)["patch"]
        Communicator(transport).all_gather(axis, "moments", "norm1", torch.ones(3)).wait()
        used.append(memory.sizes)

    assert stand_in.run(on_rank) == [None, None]
    assert used == [[], []]


def test_a_failed_exchange_ends_those_that_wait_there() -> None:
    stand_in, gave_up = StandIn(2), []

    def on_rank(transport: TorchTransport) -> None:
        memory = sharing(transport, stand_in, 2)
        transport.poison("a rank is gone")
        gave_up.append(memory.has_given_up)
        with pytest.raises(ExchangeError, match="a rank is gone"):
            transport.send_recv([], [], "norm1")

    assert stand_in.run(on_rank) == [None, None]
    assert gave_up == [True, True]


# --- whether there is any -------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def in_memory(num_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def without(num_bytes: int, device: torch.device) -> Tensor:
    raise RuntimeError("CUDA out of memory")


def shared(memory: Tensor, group: Any) -> MappedMemory:
    return MappedMemory(memory, [memory.data_ptr()] * 2, None)


def refused(memory: Tensor, group: Any) -> MappedMemory:
    raise RuntimeError("no access between cuda:0 and cuda:1")


def agreeing(own: Tensor) -> Tensor:
    return torch.stack([own, own])


def with_a_failure(own: Tensor) -> Tensor:
    return torch.stack([own, own + torch.tensor([1, 0])])


def of_two_hosts(own: Tensor) -> Tensor:
    return torch.stack([own, own + torch.tensor([0, 1])])


@pytest.mark.parametrize(
    ("allocate", "rendezvous", "gather", "works", "message"),
    [
        (in_memory, shared, agreeing, True, ""),
        (without, shared, agreeing, True, "CUDA out of memory"),
        (in_memory, refused, agreeing, True, "no access between cuda:0 and cuda:1"),
        (in_memory, shared, with_a_failure, True, r"no symmetric memory on ranks \[5\]"),
        (in_memory, shared, of_two_hosts, True, "ranks are on several hosts"),
        (in_memory, shared, agreeing, False, "what was written to the memory of another rank has not come"),
    ],
)
def test_all_ranks_use_it_or_none_and_the_log_says_why(
    allocate: Any,
    rendezvous: Any,
    gather: Callable[[Tensor], Tensor],
    works: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(symmetric_memory, "why_not", lambda _: "")
    monkeypatch.setattr(symmetric_memory, "works", lambda *_: works)
    found = formed((4, 5), mock.Mock(rank=lambda: 0), CPU, gather, allocate, rendezvous)
    assert isinstance(found, PeerMemory) == (not message)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(message)
    assert re.search(message, caplog.text)


def test_no_rank_waits_for_the_memory_of_one_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks map memory together: torch waits for minutes for one that does not come."""
    monkeypatch.setattr(symmetric_memory, "why_not", lambda _: "")
    monkeypatch.setattr(symmetric_memory, "works", lambda *_: True)
    rank, rendezvous = mock.Mock(rank=lambda: 0), mock.Mock(side_effect=shared)
    questions = iter([agreeing, with_a_failure])
    assert formed((4, 5), rank, CPU, lambda own: next(questions)(own), in_memory, rendezvous) is None
    assert not rendezvous.called
    assert formed((4, 5), rank, CPU, agreeing, in_memory, rendezvous) is not None
    assert rendezvous.called, "control: all have some"


def test_this_build_says_that_it_has_none() -> None:
    """Of a torch for CPUs."""
    assert symmetric_memory.why_not(CPU)


def test_ranks_without_a_card_each_are_told(caplog: pytest.LogCaptureFixture) -> None:
    form_groups(mock.Mock(collectives=None), [(0, 1)], symmetric_memory=False)
    assert not caplog.text
    form_groups(mock.Mock(collectives=None), [(0, 1)], symmetric_memory=True)
    assert "exchange through memory of the host" in caplog.text


@pytest.mark.parametrize(
    ("value", "devices", "message"),
    [
        ("yes", "cpu:2", "symmetric_memory='yes': use True or False"),
        (True, "cpu:2", "GPUs have such memory, and this pipeline is on cpu, cpu: leave it out"),
    ],
)
def test_the_option_is_checked_before_a_worker_starts(value: object, devices: str, message: str) -> None:
    start: dict[str, Any] = {"deadline": 60.0, "start_timeout": 60.0, "start_method": "auto"}
    with pytest.raises(PlanError, match=message):
        check_request(devices, "auto", **start, verify=True, vae="auto", symmetric_memory=value)
    assert not check_request(devices, "auto", **start, verify=True, vae="auto").symmetric_memory
