"""Parts of blocks that cannot be split: every rank computes them with all tokens, and the rest of the block with its
own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.attention.all_gather import attend_gathered
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.token_plan import Replicated, TokenRows
from patchpar.shard.transformer.token_plan_json import from_json, to_json
from patchpar.strategies import parse_strategy
from tests.unit.threads import on_threads
from tests.versions import needs_class

from .ranks import LIMIT, TRANSFORMERS, error, predictions

NAME = "WanAnimate2Transformer3DModel"
WIDTH, HEADS = 12, 3


class Placed(nn.Module):
    """Attention that makes the positions of its tokens itself, of a grid that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        rows, columns = grid.tolist()
        positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).sum(1)
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in self.to_qkv(x * positions[:, None].cos()).chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Placed()
        self.ff = nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH))

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x), grid)
        return x + self.ff(x)


class Denoiser(nn.Module):
    """Latents [B, C, H, W] as tokens."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([Block(width), Block(width)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        grid = torch.tensor(hidden_states.shape[2:])
        x = hidden_states.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, grid)
        return x.transpose(1, 2).unflatten(2, hidden_states.shape[2:])


def latent() -> Tensor:
    return torch.randn(2, WIDTH, 5, 7, generator=torch.Generator().manual_seed(1))


def on_ranks(ranks: int, mode: Any = attend_gathered) -> list[list[Tensor]]:
    """What each rank predicts."""
    models = [Denoiser() for _ in range(ranks)]  # here: ranks that are threads would seed one generator together
    plan = discover_tokens(models[0], models[0].forward, (latent(),), {})

    def on_rank(transport: Any) -> list[Tensor]:
        own, axis = models[transport.rank], Axis("patch", transport.rank, ranks, tuple(range(ranks)))
        shard = TransformerSharder(own, plan, TokenSplit(Communicator(transport), axis, mode))
        with torch.no_grad():
            return predictions(shard.denoise(own.forward, latent()))

    return on_threads(ranks, on_rank, deadline=60.0)


def test_what_is_found() -> None:
    model = Denoiser()
    plan = discover_tokens(model, model.forward, (latent(),), {})
    (block,) = plan.blocks
    assert block.replicated == (Replicated("attn", {"x": TokenRows(1)}, {0: TokenRows(1)}),)
    assert block.attentions == ()  # that of the part is the part's
    assert "computed by every rank with all tokens of x along dim 1" in str(plan)
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_exact(ranks: int) -> None:
    with torch.no_grad():
        want = [Denoiser()(latent())]
    assert error(on_ranks(ranks), want) <= LIMIT
    assert error(on_ranks(ranks, None), want) > 100 * LIMIT


def test_heads_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank computes the attention of its heads, and the other layers of its tokens only."""
    heads, tokens, run = [], [], AttentionCall.run

    def counted(call: AttentionCall) -> Tensor:
        heads.append(call.query.shape[1])
        return run(call)

    models, call = [Denoiser(), Denoiser()], latent()
    plan = discover_tokens(models[0], models[0].forward, (call,), {})
    monkeypatch.setattr(AttentionCall, "run", counted)

    def on_rank(transport: Any) -> None:
        own, axis = models[transport.rank], Axis("patch", transport.rank, 2, (0, 1))
        own.blocks[0].ff[0].register_forward_hook(lambda module, args, output: tokens.append(args[0].shape[1]))
        shard = TransformerSharder(own, plan, TokenSplit(Communicator(transport), axis, attend_gathered))
        with torch.no_grad():
            shard.denoise(own.forward, call)

    assert on_threads(2, on_rank, deadline=60.0) == [None, None]
    assert sorted(heads) == [1, 1, 2, 2]
    assert sorted(tokens) == [17, 18]


def test_nothing_is_gained_where_nearly_all_is_one_part() -> None:
    model = Denoiser(width=4)
    with pytest.raises(UnsupportedModel, match="with some of its tokens alone it fails"):
        discover_tokens(model, model.forward, (latent(),), {})


def test_values_of_the_last_step_are_refused() -> None:
    model = Denoiser()

    def on_rank(transport: Any) -> Any:
        layer: Any = parse_strategy("displaced:warmup_steps=1").install(
            model, Communicator(transport), Axis("patch", 0, 1, (0,)), clock=StepClock()
        )
        layer.denoise(model.forward, latent())

    (found,) = on_threads(1, on_rank, deadline=60.0)
    assert isinstance(found, UnsupportedModel)
    assert "meet in parts that are not split (attn), and stale values of these are not kept" in str(found)


def test_compiled_blocks_are_refused() -> None:
    model = Denoiser()
    plan = discover_tokens(model, model.forward, (latent(),), {})
    for block in model.blocks:
        block.compile(backend="eager")
    shard = TransformerSharder(model, plan, TokenSplit(None, Axis("patch", 0, 1, (0,)), attend_gathered))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match=r"blocks\.0 is compiled, .* in parts that every rank computes"):
        shard.denoise(model.forward, latent())
    shard.restore()
    assert not any(hasattr(module, "_diffusers_hook") for module in model.modules())


def animated() -> nn.Module:
    """With the mask of a video of 2 frames, which diffusers makes by compiling."""
    model: Any = TRANSFORMERS[NAME].build()
    frames, cells = 2, 24
    ends = [-(-count // 128) * 128 for count in ((frames + 1) * cells, frames * cells)]

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        reference = k - ends[0]
        same_frame = (reference >= 0) & (reference < frames * cells) & (q // cells == reference // cells + 1)
        return (q < (frames + 1) * cells) & ((k < (frames + 1) * cells) | same_frame)

    mask = create_block_mask(sees, B=None, H=None, Q_LEN=ends[0], KV_LEN=sum(ends), device="cpu")
    model.block_masks[(frames, cells)] = mask
    return model


@needs_class(NAME)
@pytest.mark.breadth
def test_keys_of_a_reference_and_flex_attention() -> None:
    """The second pass of Wan-Animate-2, which attends to keys that the first has kept."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    first = TRANSFORMERS[NAME].call(1)
    grid = first.pop("offset_grid_sizes")
    video = {"kv_cache_mode": "cached", "origin_len": 5, "origin_area": [64, 96], "reference_grid_sizes": grid}

    def calls() -> list[dict[str, Any]]:
        both = first | {"kv_cache": WanAnimate2KVCache(3)}
        return [both | {"offset_grid_sizes": grid}, both | video]

    model, plans, want = animated(), [], []
    with torch.no_grad():
        for call in calls():
            plans.append(discover_tokens(model, model.forward, (), call))
            want = predictions(model(**call))
    models = [animated() for _ in range(2)]

    def on_rank(transport: Any, mode: Any) -> list[Tensor]:
        model, axis, got = models[transport.rank], Axis("patch", transport.rank, 2, (0, 1)), []
        for plan, call in zip(plans, calls(), strict=True):
            shard = TransformerSharder(model, plan, TokenSplit(Communicator(transport), axis, mode))
            with torch.no_grad():
                got = predictions(shard.denoise(model.forward, **call))
            shard.restore()
        return got

    assert error(on_threads(2, on_rank, attend_gathered, deadline=60.0), want) <= LIMIT
    assert error(on_threads(2, on_rank, None, deadline=60.0), want) > 100 * LIMIT
