"""What the process does to bring a block into its slot, counted and not timed: functions of Python, and of torch.

On a GPU this is time of the host for every block of every step, in which it enqueues nothing that computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version

from benchmarks.gpu.host_time import CPU, Step, python_calls, quiet_rank, torch_functions
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.plan.mesh import Axis, Mesh
from patchpar.shard.weights.device_shards import DeviceShards
from patchpar.shard.weights.host_store import HostStore
from patchpar.shard.weights.placed import PlacedBlock
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.shard.weights.stores import BlockStore
from tests.versions import TORCH
from tests.weights import networks

BLOCKS = 6

# Ceilings only go down: who needs fewer calls enters the new numbers, which a failure prints.
CEILINGS = {"sharded": 32 + (Version("2.7") > TORCH), "hosted": 17}
"""Calls that a block adds to those of whole weights: by one operation of all ranks, and by copies from the host.

Of torch 2.6 the wait of a work is a function of Python here, since that is what stands for NCCL."""
OF_TORCH = {"sharded": 5, "hosted": 1}
"""Functions of torch: the operation, and two events that are made and recorded; a copy from each rank's memory."""
OF_A_GATHER = {"sharded": 17, "sharded apart": 39}
"""Calls from its start to the end of its wait, of two ranks of one host: in place, and by messages that have come."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[Step, Step]]]:
    """A call of a network with its weights in slots, and one with whole weights, by the kind of the former."""
    monkeypatch.setattr("patchpar.shard.weights.sharded.refuse_other_layouts", lambda *_: None)  # nothing arrives
    with torch.no_grad(), quiet_rank(1, 2):
        of_two, alone = Communicator(TorchTransport(CPU, 60.0)), Communicator(SharedMemoryTransport(0, {}, CPU, 60.0))
        yield {
            "sharded": in_slots(lambda axis: DeviceShards(axis, CPU), Mesh(1, range(2), patch=2)["patch"], of_two),
            "hosted": in_slots(lambda axis: HostStore(axis, CPU), Axis("patch"), alone),
        }


def in_slots(store: Callable[[Axis], BlockStore], axis: Axis, comm: Communicator) -> tuple[Step, Step]:
    network, x = networks.Chain(BLOCKS).eval().requires_grad_(False), networks.sample()
    whole = copy.deepcopy(network)
    ShardedWeights(network, store(axis)).join(comm)
    for _ in range(3):  # from the second on, the next block comes while one runs
        network(x)
    return lambda: network(x), lambda: whole(x)


def added(steps: tuple[Step, Step], count: Callable[[Step], int]) -> float:
    divided, whole = (min(count(step) for _ in range(3)) for step in steps)  # a thread that watches wakes now and then
    return (divided - whole) / BLOCKS


@pytest.mark.parametrize("kind", CEILINGS)
def test_a_block_calls_no_more_of_python_than_its_ceiling(steps: Any, kind: str) -> None:
    found = added(steps[kind], python_calls)
    assert found <= CEILINGS[kind], f"{found:.1f} calls"


@pytest.mark.parametrize("kind", OF_TORCH)
def test_a_block_calls_no_more_of_torch_than_what_moves_it(steps: Any, kind: str) -> None:
    found = added(steps[kind], lambda step: len(torch_functions(step)))
    assert found <= OF_TORCH[kind], f"{found:.1f} functions"


def test_a_call_more_in_every_block_is_counted(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, put = added(steps["hosted"], python_calls), PlacedBlock.put
    monkeypatch.setattr(PlacedBlock, "put", lambda block: put(block))
    assert added(steps["hosted"], python_calls) == pytest.approx(before + 2)


@pytest.mark.parametrize("kind", OF_A_GATHER)
def test_a_gather_on_one_host_calls_no_more_of_python_than_its_ceiling(ranks: Any, kind: str) -> None:
    for found in ranks.run("tests.weights.on_ranks:calls_of_a_gather", 2, kind):
        assert found <= OF_A_GATHER[kind], f"{found} calls"
