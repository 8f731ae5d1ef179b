"""Transformer pipelines of diffusers, unmodified, in processes of their own: tokens split, against one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.models.info import describe
from tests import tiny
from tests.breadth import first_of
from tests.conftest import POOL_SIZE
from tests.tensors import relative

from .on_ranks import PipelineCase, arguments, latents_of

EXACT = 1e-5
NAMES = tuple(tiny.TRANSFORMERS_PIPED)
STALE = "strategy=displaced:warmup_steps=1"


def generate(ranks: Any, *cases: PipelineCase) -> list[Any]:
    found: list[Any] = ranks.run("tests.tokens.on_ranks:generated", POOL_SIZE, list(cases))[0]
    return found


@cache
def plain(name: str, **options: Any) -> Tensor:
    found = tiny.build(name)
    case = PipelineCase(name=name, plan="", options=dict(options))
    return latents_of(found.pipe(**arguments(case, found)))


@pytest.mark.parametrize("name", first_of(NAMES, "wan"))
def test_the_same_latents(ranks: Any, name: str, tmp_path: Path) -> None:
    """On 2 and 3 ranks, and beside a split of guidance; not without the exchange, nor quite with keys of the last step.

    No line of ours knows any of these models.
    """
    found = tiny.build(name)
    guided = describe(found.pipe).guided(found.call_kwargs)
    plans = ["patch=2", "patch=3", *(["cfg=2,patch=2"] if guided else [])]
    exact = [PipelineCase(name=name, plan=plan, verifications=tmp_path) for plan in plans]
    off = PipelineCase(name=name, plan="patch=2", exchange="off", verifications=tmp_path)
    stale = [
        PipelineCase(name=name, plan=f"patch=2,{STALE}", twice=twice, verifications=tmp_path) for twice in (False, True)
    ]
    *generated, alone, once, again = generate(ranks, *exact, off, *stale)
    want = plain(name)
    assert not [each for each in (*generated, alone, once) if isinstance(each, str)]
    assert max(relative(each, want) for each in generated) <= EXACT
    assert relative(alone, want) > 10 * EXACT
    assert 2 * EXACT < relative(once, want) < 0.5
    assert torch.equal(once, again)  # nothing of the image before is left


@pytest.mark.parametrize(("name", "text"), first_of([("flux", 32), ("qwen", 32)], ("qwen", 32)))
def test_as_many_tokens_of_text_as_of_image(ranks: Any, name: str, text: int) -> None:
    """Lengths tell nothing: 64 tokens of image on two ranks are 32 each."""
    found = tiny.build(name)
    seen = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((kwargs["hidden_states"].shape[1], kwargs["encoder_hidden_states"].shape[1]))

    prompt = {} if name == "flux" else prompts_of(found, text)
    hook = found.denoiser.register_forward_pre_hook(note, with_kwargs=True)
    found.pipe(**arguments(PipelineCase(name=name, plan="", options=prompt), found))
    hook.remove()
    assert (64, text) in seen
    (got,) = generate(ranks, PipelineCase(name=name, plan="patch=2", options=prompt))
    fresh = tiny.build(name)
    want = latents_of(fresh.pipe(**arguments(PipelineCase(name=name, plan="", options=prompt), fresh)))
    assert relative(got, want) <= EXACT


def prompts_of(found: tiny.Tiny, tokens: int) -> dict[str, Any]:
    """Arguments whose text has so many tokens."""
    generator = torch.Generator().manual_seed(5)
    width = found.denoiser.config["joint_attention_dim"]
    embeds, negative = (torch.randn(1, tokens, width, generator=generator) for _ in range(2))
    mask = torch.ones(1, tokens, dtype=torch.long)
    return {
        "prompt": None,
        "negative_prompt": None,
        "prompt_embeds": embeds,
        "prompt_embeds_mask": mask,
        "negative_prompt_embeds": negative,
        "negative_prompt_embeds_mask": mask,
    }


WAYS = ("ring", "two-way-ring", "token-ring", "gather:ulysses=2", "ring:ulysses=2")


@pytest.mark.parametrize("way", first_of(WAYS))
def test_every_way_of_exchanging_keys(ranks: Any, way: str) -> None:
    cases = [PipelineCase(name=name, plan=f"patch=4,strategy=exact:attention={way}") for name in ("flux", "pixart")]
    for case, got in zip(cases, generate(ranks, *cases), strict=True):
        assert relative(got, plain(case.name)) <= EXACT


def test_a_model_is_verified_once(ranks: Any, tmp_path: Path) -> None:
    case = PipelineCase(name="sd3", plan="patch=2", verifications=tmp_path, steps=2)
    first = generate(ranks, case)[0]
    kept = sorted(tmp_path.glob("*.json"))
    texts = [file.read_text() for file in kept]
    assert ["relative_error" in text for text in texts] == [True]
    assert torch.equal(generate(ranks, case)[0], first)
    assert sorted(tmp_path.glob("*.json")) == kept


def test_more_ranks_than_tokens(ranks: Any) -> None:
    """48 x 16 pixels are three tokens."""
    (got,) = generate(ranks, PipelineCase(name="pixart", plan="patch=4", options={"height": 48, "width": 16}))
    assert got.startswith("PlanError: transformer_blocks.0 has 3 tokens, too few for 4 ranks: use a larger image")
