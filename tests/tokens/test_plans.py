"""What is found out about transformers, and what is refused."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from patchpar.errors import UnsupportedModel
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.probe.latent import latent_size
from patchpar.shard.transformer.token_plan import TokenRows
from patchpar.shard.transformer.token_plan_json import from_json, to_json
from tests.breadth import first_of

from .ranks import TRANSFORMERS, plan_of

plan_for = cache(plan_of)

FLUX = """\
FluxTransformer2DModel, 5 blocks split by tokens
transformer_blocks, 2 x FluxTransformerBlock
  tokens lie in                    the grid of image_rotary_emb[0]
  hidden_states                    tokens along dim 1
  image_rotary_emb[0]              tokens along dim 0, last
  image_rotary_emb[1]              tokens along dim 0, last
  attention 0                      keys exchanged, tokens along dim 2, last
  output 1                         tokens along dim 1
  encoder_hidden_states            text along dim 1
  image_rotary_emb[0]              text along dim 0, first
  image_rotary_emb[1]              text along dim 0, first
  attention 0                      text: keys exchanged, tokens along dim 2, first
  output 0                         text along dim 1
single_transformer_blocks, 3 x FluxSingleTransformerBlock
  tokens lie in                    the grid of image_rotary_emb[0]
  hidden_states                    tokens along dim 1
  image_rotary_emb[0]              tokens along dim 0, last
  image_rotary_emb[1]              tokens along dim 0, last
  attention 0                      keys exchanged, tokens along dim 2, last
  output 1                         tokens along dim 1
  encoder_hidden_states            text along dim 1
  image_rotary_emb[0]              text along dim 0, first
  image_rotary_emb[1]              text along dim 0, first
  attention 0                      text: keys exchanged, tokens along dim 2, first
  output 0                         text along dim 1"""


def test_a_person_can_read_it() -> None:
    assert str(plan_for("FluxTransformer2DModel")) == FLUX


@pytest.mark.parametrize(
    "name",
    first_of(
        ["FluxTransformer2DModel", "HeliosTransformer3DModel", "NucleusMoEImageTransformer2DModel"],
        "FluxTransformer2DModel",
    ),
)
def test_written_and_read(name: str) -> None:
    plan = plan_for(name)
    assert from_json(to_json(plan)) == plan
    assert to_json(plan_of(name)) == to_json(plan)


def test_plans_of_several_calls() -> None:
    one, other = plan_of("HiDreamImageTransformer2DModel"), plan_of("HiDreamImageTransformer2DModel", 1)
    both = one.joined(other)
    for plan in (one, other):
        for block in plan.blocks:
            assert both.find(block.paths[0], block.signature) == block
    assert both.joined(one) == both
    with pytest.raises(UnsupportedModel, match=r"watched with other arguments .* hidden_states_masks: NoneType"):
        one.find("double_stream_blocks.0", other.blocks[0].signature)


def test_watching_leaves_no_trace() -> None:
    tiny = TRANSFORMERS["SD3Transformer2DModel"]
    model, call = tiny.build(), tiny.call(0)
    with torch.no_grad():
        before = model(**call)[0]
        discover_tokens(model, model.forward, (), call)
        assert torch.equal(model(**call)[0], before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "name",
    first_of(
        ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "SD3Transformer2DModel"], "FluxTransformer2DModel"
    ),
)
def test_as_many_image_tokens_as_text(name: str) -> None:
    """The same plan as with other numbers, so that nothing has been told by its length."""
    tiny = TRANSFORMERS[name]
    call = tiny.call(0)
    text = call["encoder_hidden_states"]
    same = text[:, :1].expand(-1, 35, -1) + torch.randn(
        2, 35, text.shape[2], generator=torch.Generator().manual_seed(1)
    )
    call |= {"encoder_hidden_states": same}
    if "txt_ids" in call:
        call |= {"txt_ids": torch.zeros(35, 3)}
    if "encoder_hidden_states_mask" in call:
        call |= {"encoder_hidden_states_mask": torch.ones(2, 35, dtype=torch.bool)}
    model = tiny.build()
    plan = discover_tokens(model, model.forward, (), call)
    assert plan.blocks == plan_for(name).blocks


@pytest.mark.parametrize("dtype", first_of([torch.float16, torch.bfloat16], torch.bfloat16))
@pytest.mark.parametrize(
    "name",
    first_of(
        ["FluxTransformer2DModel", "PixArtTransformer2DModel", "Lumina2Transformer2DModel"], "PixArtTransformer2DModel"
    ),
)
def test_the_same_plan_in_half_precision(name: str, dtype: torch.dtype) -> None:
    tiny = TRANSFORMERS[name]
    model = tiny.build().to(dtype)
    call = tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tiny.call(0))
    assert discover_tokens(model, model.forward, (), call) == plan_for(name)


class Block(nn.Module):
    """Attention between tokens, and what `mixes` does besides."""

    def __init__(self, mixes: str) -> None:
        super().__init__()
        self.mixes = mixes

    def forward(self, x: Tensor, last: int) -> Tensor:
        q = x.unsqueeze(1)
        if self.mixes == "attention of its own":
            return x + (q @ q.mT).softmax(-1).matmul(q).squeeze(1)
        y = x + F.scaled_dot_product_attention(q, q, q).squeeze(1)
        if self.mixes == "a mean":
            return y + y.mean(1, keepdim=True)
        if self.mixes == "neighbours":
            return y + y.roll(1, 1)
        if self.mixes == "order":
            return y.flip(1)
        if self.mixes == "the first":
            return torch.cat([y[:, :last].sin(), y[:, last:]], 1)
        first, rest = y.split([y.shape[1] - last, last], 1)
        return torch.cat([first, rest.sin()], 1)


class Denoiser(nn.Module):
    def __init__(self, mixes: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(mixes)])

    def forward(self, hidden_states: Tensor, last: int = 12) -> Tensor:
        return self.blocks[0](hidden_states, last)


@pytest.mark.parametrize(
    ("mixes", "why"),
    [
        ("a mean", "output 0 depends on several tokens at once"),
        ("neighbours", "output 0 depends on several tokens at once"),
        ("order", "output 0 does not have the tokens in their order"),
        ("attention of its own", "does not call scaled_dot_product_attention"),
        ("", "with some of its tokens alone it fails: its output 0 is another one"),  # `last` is no number of tokens
    ],
)
def test_blocks_that_cannot_be_split(mixes: str, why: str) -> None:
    model = Denoiser(mixes)
    with pytest.raises(UnsupportedModel, match=f"Denoiser cannot be split by tokens .*{why}.* use plan cfg=2"):
        discover_tokens(model, model.forward, (torch.randn(2, 35, 8),), {})


def test_a_number_of_tokens_is_found_by_trying() -> None:
    model = Denoiser()
    plan = discover_tokens(model, model.forward, (torch.randn(2, 35, 8),), {"last": 35})
    assert plan.blocks[0].counts == ("last",)
    assert plan.blocks[0].inputs == {"x": TokenRows(1)}
    assert plan.blocks[0].bounds == ()


def test_a_number_of_the_first_tokens_is_found_by_trying() -> None:
    model = Denoiser("the first")
    plan = discover_tokens(model, model.forward, (torch.randn(2, 35, 8),), {"last": 12})
    assert plan.blocks[0].bounds == ("last",)
    assert plan.blocks[0].counts == ()
    assert "last                             how many of the first are treated otherwise" in str(plan)
    assert from_json(to_json(plan)) == plan


class Interleaved(Denoiser):
    """A sequence with something amid its tokens."""

    def forward(self, hidden_states: Tensor, last: int = 0) -> Tensor:
        amid = torch.ones(2, 5, 8)
        return super().forward(torch.cat([hidden_states[:, :9], amid, hidden_states[:, 9:]], 1), last)


def test_the_latent_of_one_sample() -> None:
    sample = torch.randn(4, 1, 6, 6)
    for latent in ([sample], [sample, sample], torch.stack([sample, sample])):
        assert latent_size(CallArguments(("x",), (latent,), {}), "x") == sample.numel()
    with pytest.raises(UnsupportedModel, match="the first argument, x, holds no tensor"):
        latent_size(CallArguments(("x",), ("a prompt",), {"xs": sample}), "x")


def test_tokens_in_several_runs() -> None:
    """All that is in the sequence is split."""
    model = Interleaved()
    plan = discover_tokens(model, model.forward, (torch.randn(2, 35, 8),), {})
    assert plan.blocks[0].inputs == {"x": TokenRows(1)}
    assert plan.blocks[0].ratio == 40 / (35 * 8)


def test_rows_beside_the_tokens() -> None:
    assert TokenRows(0, None, 0).start(47, 35) == 12
    assert TokenRows(0, 0, None).start(47, 35) == 0
    assert TokenRows(0, 3, None).start(47, 35) == 3
    assert TokenRows(0, None, 3).start(47, 35) == 9
    with pytest.raises(UnsupportedModel, match="47 rows do not hold 35 tokens"):
        TokenRows(0).start(47, 35)
    with pytest.raises(UnsupportedModel, match="35 rows do not hold 47 tokens"):
        TokenRows(0, 0, None).start(35, 47)
