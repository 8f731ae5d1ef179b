"""diffusers' caches beside split tokens: all ranks leave out the same blocks, those that one process leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.hooks import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    TextKVCacheConfig,
)
from diffusers.hooks.first_block_cache import FBCHeadBlockHook
from torch import Tensor

from tests import tiny
from tests.breadth import first_of
from tests.conftest import POOL_SIZE
from tests.tensors import relative

from .on_ranks import PipelineCase, arguments, latents_of
from .test_pipelines import EXACT, generate


def no_time() -> int:
    """What a cache asks for."""
    return 500


STEPS = 6
RATIOS = torch.linspace(1.02, 0.98, STEPS).tolist()
FIRST_BLOCK = {"flux": FirstBlockCacheConfig(threshold=0.343), "cogvideox": FirstBlockCacheConfig(threshold=0.19)}
MAGNITUDES = MagCacheConfig(
    threshold=0.5, max_skip_steps=2, retention_ratio=0.2, num_inference_steps=STEPS, mag_ratios=RATIOS
)
PREDICTED = TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2, max_order=1)
ATTENTION = PyramidAttentionBroadcastConfig(
    spatial_attention_block_skip_range=2,
    spatial_attention_timestep_skip_range=(-1, 1001),
    current_timestep_callback=no_time,
)
CASES = [*FIRST_BLOCK.items(), ("flux", MAGNITUDES), ("cogvideox", MAGNITUDES), ("flux", PREDICTED)]
TITLES = [f"{name}-{type(cache).__name__}" for name, cache in CASES]


def plain(name: str, cache: Any) -> tuple[Tensor, list[bool]]:
    """Latents of one process, and what its first-block cache decided."""
    found, decided = tiny.build(name), []
    decide = FBCHeadBlockHook._should_compute_remaining_blocks

    def noted(hook: Any, residual: Tensor) -> bool:
        decided.append(decide(hook, residual))
        return decided[-1]

    if cache is not None:
        found.denoiser.enable_cache(cache)
    with patch.object(FBCHeadBlockHook, "_should_compute_remaining_blocks", noted):
        return latents_of(found.pipe(**arguments(PipelineCase(name=name, plan="", steps=STEPS), found))), decided


@pytest.mark.parametrize("plans", first_of(["patch=3 cfg=2,patch=2", "patch=2 cfg=2"], "patch=3 cfg=2,patch=2"))
@pytest.mark.parametrize(("name", "cache"), first_of(CASES, CASES[0]), ids=TITLES)
def test_as_in_one_process(ranks: Any, name: str, cache: Any, plans: str, tmp_path: Path) -> None:
    """FLUX calls its denoiser once for each branch, CogVideoX once for both."""
    want, decided = plain(name, cache)
    without, _ = plain(name, None)
    if isinstance(cache, FirstBlockCacheConfig):
        assert {True, False} <= set(decided)  # some steps are computed, some are not
    assert relative(without, want) > 10 * EXACT
    options: dict[str, Any] = {"steps": STEPS, "cache": cache, "verifications": tmp_path}
    cases = [PipelineCase(name=name, plan=plan, **options) for plan in plans.split()]
    for case, got in zip(cases, generate(ranks, *cases), strict=True):
        assert not isinstance(got, str), got
        assert relative(got, want) <= EXACT, case.plan


@pytest.mark.parametrize(("name", "plans"), [("flux", "patch=3"), ("cogvideox", "patch=3 cfg=2,patch=2")])
def test_each_rank_keeps_the_attention_of_its_tokens(ranks: Any, name: str, plans: str) -> None:
    (want, _), (without, _) = plain(name, ATTENTION), plain(name, None)
    assert relative(without, want) > 10 * EXACT, "control"
    cases = [PipelineCase(name=name, plan=plan, steps=STEPS, cache=ATTENTION, twice=True) for plan in plans.split()]
    for case, got in zip(cases, generate(ranks, *cases), strict=True):
        assert not isinstance(got, str), got
        assert relative(got, want) <= EXACT, case.plan


@pytest.mark.parametrize("cache", [FIRST_BLOCK["flux"], PREDICTED, ATTENTION], ids=lambda each: type(each).__name__)
def test_a_network_that_gets_a_cache_between_images(ranks: Any, cache: Any) -> None:
    """By a method of its own, which nobody is told of."""
    (want, _), (without, _) = plain("flux", cache), plain("flux", None)
    found = ranks.run("tests.tokens.on_ranks:cached_past_the_engine", POOL_SIZE, cache, STEPS)[0]
    for got, wanted in zip(found, (without, want, without), strict=True):
        assert relative(got, wanted) <= EXACT


def test_each_rank_alone_would_decide_otherwise(ranks: Any) -> None:
    """Of two ranks one would go on and the other would not, at some step: what the vote is for."""
    reported = ranks.run("tests.tokens.on_ranks:own_decisions", POOL_SIZE, FIRST_BLOCK["flux"], STEPS)[:2]
    assert reported[0] != reported[1]


PROMPTS = ["a red house", "three tall pines by a lake"]


def first_change(prompts: list[str]) -> float:
    """The measure of a first-block cache in the first step that it may leave out."""
    found, measured = tiny.build("flux"), []

    def noted(hook: Any, residual: Tensor) -> bool:
        before = hook.state_manager.get_state().head_block_residual
        if before is not None:
            measured.append(float((residual - before).abs().mean() / before.abs().mean()))
        return True

    found.denoiser.enable_cache(FirstBlockCacheConfig(threshold=1.0))
    with patch.object(FBCHeadBlockHook, "_should_compute_remaining_blocks", noted):
        found.pipe(**arguments(PipelineCase(name="flux", plan="", steps=2, options={"prompt": prompts}), found))
    return measured[0]


def test_prompts_on_several_ranks_decide_together(ranks: Any) -> None:
    """As in one process, by the mean of all prompts: this rank's alone would decide otherwise."""
    measures = [first_change(PROMPTS), first_change(PROMPTS[:1])]
    assert abs(measures[0] / measures[1] - 1) > 1e-4
    cache = FirstBlockCacheConfig(threshold=sum(measures) / 2)
    case = PipelineCase(name="flux", plan="data=2", steps=STEPS, cache=cache, options={"prompt": PROMPTS})
    together, alone = tiny.build("flux"), tiny.build("flux")
    for each in (together, alone):
        each.denoiser.enable_cache(cache)
    want = latents_of(together.pipe(**arguments(case, together)))[:1]
    by_itself = latents_of(alone.pipe(**arguments(case, alone) | {"prompt": PROMPTS[:1], "negative_prompt": None}))
    (got,) = generate(ranks, case)
    assert relative(got, want) <= EXACT < relative(by_itself, want)


@pytest.mark.parametrize(
    ("cache", "plan", "words"),
    [
        (SeaCacheConfig(), "patch=2", "SeaCacheConfig cannot be used with axis 'patch'.*PyramidAttentionBroadcast"),
        (TextKVCacheConfig(), "patch=2", "TextKVCacheConfig cannot be used with axis 'patch'.*or cfg=2"),
        (ATTENTION, "patch=2,strategy=displaced", "PyramidAttentionBroadcast.*use strategy 'exact'"),
        (FIRST_BLOCK["flux"], "patch=2,strategy=displaced", "skips blocks in some steps.*use strategy 'exact'"),
    ],
)
def test_refused(ranks: Any, cache: Any, plan: str, words: str) -> None:
    (message,) = generate(ranks, PipelineCase(name="flux", plan=plan, cache=cache))
    assert message.startswith("UnsupportedModel: ")
    assert words.split(".*")[0] in message
    assert words.split(".*")[-1] in message
