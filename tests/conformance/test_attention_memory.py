"""Layers of exact attention that exchange in the same buffers: each gets what it would get in buffers of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.comm.collectives import Communicator
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.attention_memory import AttentionMemory
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.attention.sharded_qkv import ShardedQKV
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.block_call import KnownRuns
from patchpar.shard.transformer.token_call import TokenCall
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
