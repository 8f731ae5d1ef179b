"""Weights that are no plain tensors stay whole on every rank, which is said; networks with no others are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Mesh
from patchpar.shard.weights.outside_reads import keep_what_is_read_outside
from patchpar.shard.weights.packed import packed_blocks
from patchpar.shard.weights.sharded import SLOTS
from tests.unit.threads import on_threads
from tests.weights import networks, quantised
from tests.weights.on_ranks import equal, joined

NAMED = {"opaque": "5 OpaqueWeight (torch.float32) in Linear", "object": "5 ScriptObject in LinearPackedParams"}
RANKS = 2


@pytest.mark.parametrize("kind", ["sharded apart", "hosted"])
@pytest.mark.parametrize("form", quantised.OPAQUE)
def test_they_stay_whole_beside_others_and_are_named(caplog: pytest.LogCaptureFixture, form: str, kind: str) -> None:
    made, x = [quantised.build(form) for _ in range(RANKS)], networks.sample()  # threads share torch's random state

    @torch.no_grad()
    def on_rank(transport: Any) -> list[bool]:
        network, axis = made[transport.rank], Mesh(transport.rank, range(RANKS), patch=RANKS)["patch"]
        wanted = network(x)
        weights = joined(network, Communicator(transport), axis, kind)
        assert len(weights.blocks) == 5 > SLOTS, "the norms"
        found = [equal(network(x), wanted) for _ in range(2)]
        weights._slots[0].zero_()
        weights._start = weights._take = lambda *_: None  # type: ignore[assignment, method-assign]
        weights._holds = [0, 1]
        return [*found, not equal(network(x), wanted)]

    with caplog.at_level(logging.WARNING):
        assert on_threads(RANKS, on_rank) == [[True] * 3] * RANKS
    (message,) = (each.message for each in caplog.records if "no plain tensors" in each.message)
    assert message.startswith("QuantisedChain has weights that are no plain tensors")
    assert NAMED[form] in message
    assert "stay whole on every rank" in message


@pytest.mark.parametrize("form", quantised.OPAQUE)
def test_a_network_with_no_others_is_refused_by_name(form: str) -> None:
    network = nn.Module()
    network.blocks = nn.ModuleList(quantised.OPAQUE[form](networks.WIDTH) for _ in range(5))
    for block in network.blocks:
        block.bias = None
    with pytest.raises(UnsupportedModel) as caught:
        packed_blocks(network, torch.device("cpu"))
    assert NAMED[form] in str(caught.value)
    assert "no weights that are plain tensors in memory" in str(caught.value)
    assert "use weights=whole, or a quantisation whose weights are tensors" in str(caught.value)


@torch.no_grad()
def test_blocks_in_the_graph_of_a_compiled_part_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    """As token refiners of which compile_repeated_blocks() compiles the whole."""
    network, x = nn.Sequential(networks.build("chain"), networks.build("chain")), networks.sample()
    network[0].compile(backend="eager")
    wanted, axis = network(x), Mesh(0, range(1), patch=1)["patch"]
    with caplog.at_level(logging.WARNING):
        weights = joined(network, Communicator(SharedMemoryTransport(0, {}, x.device, 1.0)), axis, "hosted")
    assert [block.name for block in weights.blocks] == [f"1.blocks.{number}" for number in range(5)]
    assert "Sequential: the blocks in 0 stay whole on every rank, since it is compiled" in caplog.text
    assert all(equal(network(x), wanted) for _ in range(2))
    weights.restore()
    network[1].compile()
    with pytest.raises(UnsupportedModel, match=r"compiled modules \(0\), whose graphs would contain the gathers"):
        packed_blocks(network, x.device)


@torch.no_grad()
def test_blocks_that_code_outside_reads_stay_whole_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    network, x = networks.build("read outside"), networks.sample()
    wanted, axis = network(x), Mesh(0, range(1), patch=1)["patch"]
    weights = joined(network, Communicator(SharedMemoryTransport(0, {}, x.device, 1.0)), axis, "hosted")
    with caplog.at_level(logging.WARNING):
        keep_what_is_read_outside(weights, lambda: network(x))
    (message,) = (each.message for each in caplog.records if "code outside" in each.message)
    assert message.endswith("code outside blocks.1, blocks.4 reads their weights, so they stay whole")
    assert weights.in_slots == [0, 2, 3]
    assert equal(network(x), wanted)
    weights.restore()
