"""Block by block with a window of keys and values is the same function as all blocks at once under a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.streaming.causal.causal_wan import BlockAudio, BlockInputs, CausalWan
from patchpar.models.streaming.causal.rope import PatchGrid, RotaryPositions
from patchpar.models.streaming.config import CausalOptions
from tests.stream.tiny import COLUMNS, FRAMES, ROWS, causal, num_bytes, sink, speech, text, transformer
from tests.tensors import noise
from training.banded import BandedWan

BLOCKS = 6


def blocks(count: int = BLOCKS) -> list[Tensor]:
    return [noise(1, 16, FRAMES, ROWS, COLUMNS, seed=block) for block in range(count)]


def chunked(net: CausalWan, *, has_sink: bool, hears: bool = True, first: int = 0, scale: float = 1.0) -> Tensor:
    memory = net.memory(ROWS, COLUMNS)
    if has_sink:
        net.remember_sink(memory, sink(0), text(0))
    velocities = []
    for i, x in enumerate(blocks()):
        audio = BlockAudio(speech(i), scale) if hears else None
        velocities.append(net.velocity(memory, x, text(0), BlockInputs(first + i, 500.0, audio)))
    return torch.cat(velocities, 2)


def banded(net: BandedWan, *, has_sink: bool, hears: bool = True) -> Tensor:
    return net.banded(
        torch.cat(blocks(), 2),
        torch.full((1, BLOCKS), 500.0),
        text(0),
        sink_BCFHW=sink(0) if has_sink else None,
        audio_BFnC=torch.cat([speech(i) for i in range(BLOCKS)], 1) if hears else None,
    )


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("positions", ["abs", "relative"])
@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("has_sink", [False, True])
def test_chunked_equals_banded(window: int, has_sink: bool, positions: Any) -> None:
    net = causal(window=window, positions=positions)
    assert apart(chunked(net, has_sink=has_sink), banded(net, has_sink=has_sink)) < 1e-5


def test_the_comparison_sees_each_part() -> None:
    """Another window, no sink, a sink elsewhere, no sound: each moves the result by far more than rounding."""
    whole = banded(causal(), has_sink=True)
    others = {
        "window": banded(causal(window=2), has_sink=True),
        "sink": banded(causal(), has_sink=False),
        "sink's place": banded(causal(sink_distance=1), has_sink=True),
        "sound": banded(causal(), has_sink=True, hears=False),
    }
    assert {name: apart(other, whole) > 1e-3 for name, other in others.items()} == dict.fromkeys(others, True)


def test_the_scale_of_audio_is_a_factor_of_its_attention() -> None:
    net, louder = causal(), causal()
    assert louder.audio is not None
    for layer in louder.audio.layers.values():
        layer.register_forward_hook(lambda module, args, output: 2 * output)
    twice = chunked(net, has_sink=True, scale=2.0)
    assert torch.equal(twice, chunked(louder, has_sink=True))
    assert apart(twice, chunked(net, has_sink=True)) > 1e-3
    silent = chunked(net, has_sink=True, hears=False)
    assert torch.equal(chunked(net, has_sink=True, scale=0.0), silent)


def test_a_block_does_not_see_later_ones() -> None:
    net = causal()
    changed = torch.cat(blocks(), 2)
    changed[:, :, 3 * FRAMES :] += 1
    x = torch.cat(blocks(), 2)
    one, other = (net.banded(each, torch.full((1, BLOCKS), 500.0), text(0)) for each in (x, changed))
    assert torch.equal(one[:, :, : 3 * FRAMES], other[:, :, : 3 * FRAMES])
    assert not torch.equal(one, other)


def test_an_hour_later_is_the_same_image() -> None:
    """Attention sees differences of places only: far beyond Wan's own table nothing changes."""
    for positions in ("abs", "relative"):
        net = causal(positions=positions)
        assert apart(chunked(net, has_sink=True, first=100_000), chunked(net, has_sink=True)) < 1e-4


def test_positions_are_those_of_wan() -> None:
    rope = transformer().rope
    mine = RotaryPositions((rope.t_dim, rope.h_dim, rope.w_dim), PatchGrid(rows=2, columns=3), torch.device("cpu"))
    wans = rope(torch.zeros(1, 16, 5, 4, 6))
    assert all(torch.equal(a, b) for a, b in zip(mine.at(range(5)), wans, strict=True))


def test_one_block_alone_is_plain_wan() -> None:
    net = causal(hears=False)
    x = blocks()[0]
    out = net.velocity(net.memory(ROWS, COLUMNS), x, text(0), BlockInputs(0, 500.0))
    assert apart(out, transformer()(x, torch.full((1,), 500.0), text(0), return_dict=False)[0]) < 1e-5


def test_restored_is_as_it_was() -> None:
    net = causal()
    net.restore()
    x = blocks()[0]
    out, plain = (t(x, torch.full((1,), 500.0), text(0))[0] for t in (net.transformer, transformer()))
    assert torch.equal(out, plain)
    assert all(type(block.attn1.processor) is WanAttnProcessor for block in net.transformer.blocks)
    assert not any(block._forward_hooks for block in net.transformer.blocks)


def test_a_kernel_chosen_in_diffusers_is_used() -> None:
    """Each processor is told, as by `set_attention_backend`, which would tell the rest of this process as well."""
    net = causal()
    whole = chunked(net, has_sink=True)
    for block in net.transformer.blocks:
        block.attn1.processor._attention_backend = AttentionBackendName._NATIVE_MATH
    assert apart(chunked(net, has_sink=True), whole) < 1e-5
    for block in net.transformer.blocks:
        block.attn1.processor._attention_backend = "no such kernel"
    with pytest.raises(ValueError, match="no such kernel"):
        chunked(net, has_sink=True)


def test_one_transformer_serves_several_memories() -> None:
    net = causal()
    alone = chunked(net, has_sink=True)
    memories = [net.memory(ROWS, COLUMNS) for _ in range(2)]
    for memory in memories:
        net.remember_sink(memory, sink(0), text(0))
    outs: list[list[Tensor]] = [[], []]
    for i, x in enumerate(blocks()):
        for memory, out, level in zip(memories, outs, (500.0, 100.0), strict=True):
            out.append(net.velocity(memory, x, text(0), BlockInputs(i, level, BlockAudio(speech(i)))))
    assert torch.equal(torch.cat(outs[0], 2), alone)
    assert not torch.equal(torch.cat(outs[1], 2), alone)


def test_memory_is_taken_once() -> None:
    net = causal()
    memory = net.memory(ROWS, COLUMNS)
    size = num_bytes(memory)
    tokens = ROWS * COLUMNS // 4
    assert size == 4 * 2 * 24 * (2 * (tokens + 3 * FRAMES * tokens) + tokens)
    addresses = {memory.visible(0)[0].untyped_storage().data_ptr()}
    for i, x in enumerate(blocks()):
        net.velocity(memory, x, text(0), BlockInputs(i, 500.0))
        addresses.add(memory.visible(0)[0].untyped_storage().data_ptr())
    assert (num_bytes(memory), len(addresses), memory.visible_blocks) == (size, 1, 3)


def test_levels_that_differ_are_told_apart() -> None:
    net = causal()
    even = torch.full((1, BLOCKS), 500.0)
    mixed = even.clone()
    mixed[0, 2] = 900.0
    x = torch.cat(blocks(), 2)
    one, other = (net.banded(x, levels, text(0)) for levels in (even, mixed))
    same = [torch.equal(a, b) for a, b in zip(one.split(FRAMES, 2), other.split(FRAMES, 2), strict=True)]
    assert same == [True, True, False, False, False, False]


def test_it_can_be_trained() -> None:
    net = causal()
    assert net.audio is not None
    net.transformer.requires_grad_(True)
    net.audio.requires_grad_(True)
    banded(net, has_sink=True).square().mean().backward()
    heard = net.audio.embed[0].weight.grad
    assert heard is not None
    assert float(heard.abs().max()) > 0
    assert all(p.grad is not None for p in net.transformer.blocks[0].attn1.parameters())


def test_what_cannot_be() -> None:
    with pytest.raises(PlanError, match="frames=0"):
        CausalOptions(frames=0)
    with pytest.raises(PlanError, match="'abs' or 'relative'"):
        CausalOptions(positions="other")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no multiple of patches of 2 x 2"):
        causal().memory(5, 6)
    with pytest.raises(PlanError, match="a block has 2 frames"):
        causal().banded(noise(1, 16, 3, ROWS, COLUMNS), torch.zeros(1, 2), text(0))
    net = transformer()
    net.register_to_config(image_dim=4)
    with pytest.raises(UnsupportedModel, match="text-to-video"):
        CausalWan(net, CausalOptions())
