"""Tokens that meet outside attention: in sums (linear attention) and in convolutions over their grid."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.attention.all_gather import attend_gathered
from patchpar.shard.transformer import token_call
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.token_mixing import MixingSevered, TokenMixing, summed
from patchpar.shard.transformer.token_plan_json import from_json, to_json
from patchpar.strategies import parse_strategy
from tests import tiny
from tests.breadth import first_of
from tests.tensors import relative
from tests.tiny.transformers_entry import IMAGE, noise
from tests.unit.threads import on_threads

from . import piped
from .ranks import LIMIT, TRANSFORMERS, error, plain, plan_of, predictions, split

NAME, VIDEO = "SanaTransformer2DModel", "SanaVideoTransformer3DModel"
plan_for = cache(plan_of)


def of_size(rows: int, columns: int) -> dict[str, Any]:
    """A call with a latent of that size."""
    return TRANSFORMERS[NAME].call(0) | {"hidden_states": noise(2, 4, rows, columns)}


def on_ranks(
    ranks: int, call: dict[str, Any], strategy: str = "exact", exchange: str = "on", name: str = NAME
) -> list[Any]:
    """What every rank predicts, as a user has it but not verified, and what the first raised."""
    models = [TRANSFORMERS[name].build() for _ in range(ranks)]

    def on_rank(transport: Any) -> list[Tensor]:
        model, axis = models[transport.rank], Axis("patch", transport.rank, ranks, tuple(range(ranks)))
        layer: Any = parse_strategy(strategy).install(model, Communicator(transport), axis, clock=StepClock())
        layer.exchange = exchange
        with torch.no_grad():
            return predictions(layer.denoise(model.forward, **call))

    found = on_threads(ranks, on_rank, deadline=30.0)
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        raise errors[0]
    return found


def test_what_is_found() -> None:
    (block,) = plan_for(NAME).blocks
    assert block.mixing == TokenMixing(sums=(0,), convolutions=(0,), row_counts=("height",))
    assert from_json(to_json(plan_for(NAME))) == plan_for(NAME)
    (other,) = plan_for("PixArtTransformer2DModel").blocks
    assert other.mixing is None
    assert "mixing" not in to_json(plan_for("PixArtTransformer2DModel"))


@pytest.mark.breadth
def test_what_is_found_of_a_video() -> None:
    """Frames, rows and columns are equally many here."""
    (block,) = plan_for(VIDEO).blocks
    assert block.mixing == TokenMixing(
        sums=(0, 2),
        convolutions=(0,),
        row_counts=("height",),
        frame_convolutions=(1,),
        frame_counts=("frames",),
        of_video=True,
    )
    assert from_json(to_json(plan_for(VIDEO))) == plan_for(VIDEO)


@pytest.mark.parametrize("call", [lambda x: x.sum(1), lambda x: x.sum(dim=1), lambda x: torch.sum(x, [1], True)])
def test_terms_of_a_sum(call: Callable[[Tensor], Tensor]) -> None:
    """The dim that is summed over is the last of them."""
    severed, x = MixingSevered(frozenset({0}), 1), torch.randn(2, 5, 3)

    class Watched(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return severed.answer(func, args, kwargs or {})

    with Watched():
        found = call(x)
    assert torch.equal(severed.seen["sum 0 terms"], x.movedim(1, -1))
    assert found.shape == call(x).shape
    assert not torch.equal(found, call(x))
    assert summed(torch.sum, (x,), {}) is None  # over everything


def test_rows_and_columns_of_a_square_are_told_apart() -> None:
    model, call = TRANSFORMERS[NAME].build(), of_size(8, 8)
    (block,) = discover_tokens(model, model.forward, (), call).blocks
    assert block.mixing is not None
    assert block.mixing.row_counts == ("height",)


SIZES = ((7, 5, 3), (3, 6, 3), (8, 8, 2), (5, 9, 2))


@pytest.mark.breadth
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.breadth)])
def test_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """What is summed is fp32 there, made of numbers that are rounded to less. Verified as always."""

    def half(name: str) -> tiny.Tiny:
        found = sana(name)
        found.pipe.transformer.to(dtype)
        text = {key: x.to(dtype) if isinstance(x, Tensor) else x for key, x in found.call_kwargs.items()}
        return tiny.Tiny(name=name, pipe=found.pipe, call_kwargs=text)

    want = piped.plain("sana", half)
    for got in piped.shared("sana", "patch=2", tmp_path, build=half):
        assert relative(got, want) <= 3e-2


@pytest.mark.parametrize(("rows", "columns", "ranks"), first_of(SIZES))
def test_rows_that_ranks_do_not_divide(rows: int, columns: int, ranks: int) -> None:
    call = of_size(rows, columns)
    with torch.no_grad():
        want = predictions(TRANSFORMERS[NAME].build()(**call))
    assert error(on_ranks(ranks, call), want) <= LIMIT
    assert error(on_ranks(ranks, call, exchange="off"), want) > 100 * LIMIT


def test_too_few_rows() -> None:
    with pytest.raises(PlanError, match=r"has 2 rows of tokens, too few for 3 ranks.*at most 2"):
        on_ranks(3, of_size(2, 9))


@pytest.mark.breadth  # too few rows are refused in every run
def test_too_few_frames() -> None:
    call = TRANSFORMERS[VIDEO].call(0) | {"hidden_states": noise(2, 4, 2, 4, 10)}
    with pytest.raises(PlanError, match=r"has 2 frames of tokens, too few for 3 ranks.*whole frames.*at most 2"):
        on_ranks(3, call, name=VIDEO)


NEEDED = [(left_out, *case) for left_out in ("sum_over_ranks", "convolve_rows") for case in ((NAME, 0), (VIDEO, 0))]


@pytest.mark.parametrize(
    ("left_out", "name", "variant"),
    first_of(
        [*NEEDED, ("convolve_rows", VIDEO, 1)],  # a video along frames, along rows
        *(each for each in NEEDED if each[1] != VIDEO),
    ),
)
def test_either_exchange_is_needed(left_out: str, name: str, variant: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged = getattr(token_call, left_out)
    alone = TokenSplit(None, Axis("patch", 0, 2, (0, 1)), None)  # type: ignore[arg-type]

    def without(way: TokenSplit, *args: Any) -> Tensor:
        return exchanged(alone, *args)

    monkeypatch.setattr(token_call, left_out, without)
    assert error(split(name, plan_for(name), 2, variant, attend_gathered), plain(name, variant)) > 10 * LIMIT


@pytest.mark.parametrize("strategy", first_of(("displaced", "pcpp"), "displaced"))
def test_values_of_the_last_step_are_refused(strategy: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"meet in sums or convolutions.*use strategy=exact"):
        on_ranks(2, of_size(*IMAGE[0]), f"{strategy}:warmup_steps=1")


def test_compiled_blocks_are_refused() -> None:
    model = TRANSFORMERS[NAME].build()
    for block in model.transformer_blocks:
        block.compile(backend="eager")
    one = TokenSplit(None, Axis("patch", 0, 1, (0,)), attend_gathered)  # type: ignore[arg-type]
    split_model = TransformerSharder(model, plan_for(NAME), one)
    with pytest.raises(UnsupportedModel, match=r"transformer_blocks\.0 is compiled, and its tokens meet in sums"):
        split_model.denoise(model.forward, **of_size(*IMAGE[0]))
    split_model.restore()


def sana(name: str) -> tiny.Tiny:
    """diffusers' pipeline, unmodified; text comes as embeddings."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.SanaPipeline(None, None, None, TRANSFORMERS[NAME].build(), scheduler)
    pipe.set_progress_bar_config(disable=True)
    text = {
        f"{which}prompt_{what}": value
        for which, seed in (("", 1), ("negative_", 2))
        for what, value in (("embeds", noise(1, 6, 32, seed=seed)), ("attention_mask", torch.ones(1, 6)))
    }
    size = {"height": 224, "width": 160, "use_resolution_binning": False}  # 7 x 5 tokens
    return tiny.Tiny(name=name, pipe=pipe, call_kwargs={"negative_prompt": None, "guidance_scale": 4.0, **size, **text})


PLANS = ("patch=2", "patch=3", "cfg=2,patch=2")


@pytest.mark.breadth
@pytest.mark.parametrize("plan", first_of(PLANS, "cfg=2,patch=2"))
def test_a_pipeline(plan: str, tmp_path: Path) -> None:
    want = piped.plain("sana", sana)
    for got in piped.shared("sana", plan, tmp_path, build=sana):
        assert relative(got, want) <= LIMIT
    for got in piped.shared("sana", plan, tmp_path, build=sana, exchange="off"):
        assert relative(got, want) > 10 * LIMIT
