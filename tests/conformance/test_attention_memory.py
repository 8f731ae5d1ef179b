"""Layers of exact attention that exchange in the same buffers: each gets what it would get in buffers of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.comm.collectives import Communicator
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.bands import Bands
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.attention_memory import AttentionMemory
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.attention.sharded_qkv import ShardedQKV
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.block_call import KnownRuns
from patchpar.shard.transformer.token_call import TokenCall
from patchpar.shard.unet.attention_hook import attend_over_bands
from patchpar.shard.unet.discover import ExchangeSites
from patchpar.shard.unet.install import UNetSharder
from tests.conformance.stand_in import StandIn
from tests.conformance.test_faults import checked

WORLD = 3  # ranks of `checked`
LAYERS = 4
HEADS, WIDTH = 6, 8
EVEN, UNEVEN = (4, 4, 4), (5, 4, 3)
MODES = {
    "gather": AttentionMode(),
    "ring": AttentionMode(algorithm="ring"),
    "heads": AttentionMode(ulysses=3),
}


def tensors_of(layer: int, tokens: int, batch: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of all ranks."""
    generator = torch.Generator().manual_seed(layer)
    q, k, v = (torch.randn(batch, tokens, HEADS, WIDTH, generator=generator).transpose(1, 2) for _ in range(3))
    return q, k, v


def own_of(x: Tensor, sizes: tuple[int, ...], common: int, rank: int) -> Tensor:
    start = common + sum(sizes[:rank])
    return torch.cat([x[:, :, :common], x[:, :, start : start + sizes[rank]]], 2)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("common", [0, 2])
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN])
@pytest.mark.parametrize("mode", MODES)
def test_layers_that_share_buffers_get_what_is_theirs(mode: str, sizes: Any, common: int, batch: int) -> None:
    """No rank writes where another one, or an attention before, still reads; and all memory is free afterwards."""
    layers = [tensors_of(layer, common + sum(sizes), batch) for layer in range(LAYERS)]

    def attended(comm: Communicator, axis: Axis, _: object) -> list[Tensor]:
        memory, found = AttentionMemory(), list[Tensor]()
        for layer in layers:
            q, k, v = (own_of(x, sizes, common, axis.rank) for x in layer)
            shared = ShardedQKV(
                q_BNlD=q, k_BMlD=k, v_BMlD=v, sizes=sizes, group_rank=axis.rank, common=common, memory=memory
            )
            found.append(attend_together(MODES[mode], comm, axis, "attn1", shared))
            memory.release()
        storages = [storage for _, known in memory._found.values() for storage, _ in known]
        assert bool(storages) == (mode != "gather" or sizes == EVEN), "of uneven ranks nothing is gathered in place"
        assert not any(storage.nbytes() for storage in storages)
        return found

    found, faults = checked(attended)
    assert faults == []
    for rank, outputs in enumerate(found):
        for layer, out in zip(layers, outputs, strict=True):
            wanted = own_of(F.scaled_dot_product_attention(*layer), sizes, common, rank)
            assert torch.allclose(out, wanted, atol=1e-5)


def test_the_same_key_gets_the_same_buffers_with_memory_again() -> None:
    memory, made = AttentionMemory(), list[Tensor]()

    def make() -> tuple[Tensor, list[Tensor]]:
        made.append(torch.empty(4, 2))
        return made[-1].view(-1), [made[-1]]

    first = memory.take("here", make)
    first.fill_(1.0)
    memory.release()
    assert made[0].untyped_storage().nbytes() == 0
    again, other = memory.take("here", make), memory.take("elsewhere", make)
    assert again is first
    assert other is not first
    assert again.fill_(2.0).sum() == 16
    memory.free(other)
    assert [x.untyped_storage().nbytes() for x in made] == [32, 0]


def band_of(transport: Any) -> LocalPatch:
    """A band of one row of tokens on each rank."""
    comm, axis = Communicator(transport), Axis("patch", transport.rank, WORLD, tuple(range(WORLD)))
    transport.collectives.form([axis.ranks])
    return LocalPatch(comm, axis, bands=Bands(tuple(range(WORLD + 1))), whole=torch.zeros(1, 1, WORLD, 4))


def test_attentions_of_a_unet_exchange_in_the_same_buffers_in_one_call_of_it() -> None:
    """They are made once in a call, have no memory between two layers, and nothing is left of them after the call."""
    layers = [tensors_of(layer, sum(EVEN), 2) for layer in range(LAYERS)]

    class Network(nn.Module):
        def __init__(self, patch: LocalPatch) -> None:
            super().__init__()
            self.patch, self.found, self.memories = patch, list[Tensor](), list[Any]()

        def forward(self) -> None:
            for layer in layers:
                own = (own_of(x, EVEN, 0, self.patch.axis.rank) for x in layer)
                self.found.append(attend_over_bands(self.patch, "attn1", AttentionCall(*own)))
                self.memories.append(self.patch.memory)

    def attended(transport: Any) -> list[Tensor]:
        network = Network(band_of(transport))
        sharder = UNetSharder(network, ExchangeSites((), (), (), 1), network.patch)
        with torch.no_grad():
            sharder.run(network.forward, (), {})
            sharder.run(network.forward, (), {})
        memory = network.memories[0]
        assert all(each is memory for each in network.memories[:LAYERS])
        ((_, storages),) = memory._found.values()
        assert storages
        assert not any(storage.nbytes() for storage, _ in storages)
        assert network.patch.memory is None
        assert network.memories[-1] is not memory, "of another call"
        with torch.enable_grad():
            sharder.run(network.forward, (), {})
        assert network.memories[-1] is None, "gradients need what was there"
        return network.found

    stand_in = StandIn(WORLD)
    for rank, outputs in enumerate(stand_in.run(attended)):
        for layer, out in zip(3 * layers, outputs, strict=True):
            assert torch.allclose(out, own_of(F.scaled_dot_product_attention(*layer), EVEN, 0, rank), atol=1e-5)
    assert stand_in.faults == []


def memory_of(split: TokenSplit) -> Any:
    layout: Any = None
    return TokenCall(split, layout, KnownRuns())._memory


def test_buffers_are_used_again_only_where_ranks_exchange_at_once_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not over messages, whose sender does not know when they have been read; nor by a kernel, or with gradients."""

    def on_rank(transport: Any) -> list[bool]:
        comm, axis = Communicator(transport), Axis("patch", transport.rank, 2, (0, 1))
        if transport.collectives is not None:
            transport.collectives.form([(0, 1)])
        kernel: Any = F.scaled_dot_product_attention
        found = [memory_of(TokenSplit(comm, axis, None)), memory_of(TokenSplit(comm, axis, None, kernel=kernel))]
        with torch.enable_grad():
            found.append(memory_of(TokenSplit(comm, axis, None)))
        with monkeypatch.context() as patched:
            patched.setattr(transport, "device", torch.device("meta"))
            found.append(memory_of(TokenSplit(comm, axis, None)))
        transport.collectives = None
        return [x is not None for x in (*found, memory_of(TokenSplit(comm, axis, None)))]

    stand_in = StandIn(2)
    assert stand_in.run(on_rank) == [[True, False, False, False, False]] * 2
    assert stand_in.faults == []
