"""Caches of diffusers are known however they were put in: by `enable_cache`, or by a function."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from diffusers import FasterCacheConfig, FirstBlockCacheConfig, MagCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import apply_first_block_cache, apply_pyramid_attention_broadcast
from diffusers.hooks.first_block_cache import FBCHeadBlockHook, FBCSharedBlockState

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard import step_caches
from patchpar.shard.step_caches import CacheVote, caches_set_aside, refuse_caches
from tests.exact import denoisers
from tests.tiny.transformers import TRANSFORMERS


def flux() -> Any:
    return TRANSFORMERS["FluxTransformer2DModel"].build()


def test_a_cache_that_a_function_put_in() -> None:
    model = flux()
    refuse_caches(model, stale=True)
    apply_first_block_cache(model, FirstBlockCacheConfig(threshold=0.1))
    refuse_caches(model, stale=False)
    with pytest.raises(UnsupportedModel, match=r"FirstBlockCacheConfig skips blocks in some steps.*strategy 'exact'"):
        refuse_caches(model, stale=True)


@pytest.mark.parametrize("build", [flux, lambda: denoisers.build("sd")], ids=["transformer", "UNet"])
def test_broadcast_attention(build: Any) -> None:
    model = build()
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    )
    apply_pyramid_attention_broadcast(model, config)
    with pytest.raises(UnsupportedModel, match="PyramidAttentionBroadcastConfig cannot be used with axis 'patch'"):
        refuse_caches(model, stale=False)


def test_broadcast_attention_is_set_aside() -> None:
    """In calls that analyse or verify a network, which are no steps."""
    model, call = flux(), TRANSFORMERS["FluxTransformer2DModel"].call(0)
    calls = [call, call | {"hidden_states": 2 * call["hidden_states"]}]
    with torch.no_grad():
        want = [model(**each)[0] for each in calls]
        config = PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
        )
        apply_pyramid_attention_broadcast(model, config)
        with caches_set_aside(model):
            assert all(torch.equal(model(**calls[n])[0], want[n]) for n in (0, 1, 0))
        assert torch.equal(model(**calls[0])[0], want[0])
        assert not torch.equal(model(**calls[1])[0], want[1]), "control: the first call's attention is read again"


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_cache_that_measures_ratios_of_its_own_tokens_is_refused(calibrate: bool) -> None:
    """Calibrated, it decides by the number of the step; the calibration takes means over a rank's tokens."""
    model = flux()
    ratios = None if calibrate else [1.0, 1.0]
    model.enable_cache(MagCacheConfig(num_inference_steps=2, mag_ratios=ratios, calibrate=calibrate))
    with pytest.raises(UnsupportedModel, match="MagCacheConfig cannot") if calibrate else nullcontext():
        refuse_caches(model, stale=False)


def test_without_the_vote_a_cache_decides_as_diffusers() -> None:
    model = flux()
    apply_first_block_cache(model, FirstBlockCacheConfig(threshold=0.1))
    heads = [hook for hook in step_caches._cache_hooks(model) if isinstance(hook, FBCHeadBlockHook)]
    vote = CacheVote(model, cast("Communicator", None), [], StepClock())
    vote.renew()
    assert [step_caches.DECISION in vars(hook) for hook in heads] == [True]
    vote.restore()
    assert [step_caches.DECISION in vars(hook) for hook in heads] == [False]


@pytest.mark.parametrize("axis", ["data", "cfg"])
def test_a_cache_that_decides_by_a_part_of_the_batch(axis: str) -> None:
    """Only the first-block cache has a vote."""
    model = flux()
    on_two = [Axis("patch"), Axis(axis, 0, 2, (0, 1))]
    vote = CacheVote(model, cast("Communicator", None), on_two, StepClock())
    vote.renew()
    model._cache_config = type("SeaCacheConfig", (), {})()
    with pytest.raises(UnsupportedModel, match=f"SeaCacheConfig cannot be used with {axis}=2: it may decide by the"):
        vote.renew()
    CacheVote(model, vote.comm, [Axis("patch"), Axis(axis)], StepClock()).renew()


@pytest.mark.parametrize("distilled", [False, True])
def test_a_cache_that_computes_one_branch_from_the_other(distilled: bool) -> None:
    """Of two prompts on a rank with one branch, FasterCache would replace the first."""
    model = TRANSFORMERS["CogVideoXTransformer3DModel"].build()
    config = FasterCacheConfig(
        current_timestep_callback=lambda: 500,
        attention_weight_callback=lambda module: 0.5,
        tensor_format="BFCHW",
        is_guidance_distilled=distilled,
    )
    model.enable_cache(config)
    for axis in ("cfg", "data"):
        vote = CacheVote(model, cast("Communicator", None), [Axis(axis, 0, 2, (0, 1))], StepClock())
        if axis == "cfg" and not distilled:
            with pytest.raises(UnsupportedModel, match=r"FasterCacheConfig cannot be used with axis 'cfg'.*or data=N"):
                vote.renew()
        else:
            vote.renew()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("change", [0.0, 0.04, 0.06])
def test_the_vote_of_one_rank_is_the_decision_of_diffusers(dtype: torch.dtype, change: float) -> None:
    """Also where the magnitudes of all tokens add up to more than float16 holds, and where there is nothing."""
    for before in (torch.ones(1, 1024, 128, dtype=dtype), torch.zeros(1, 4, 8, dtype=dtype)):
        state = FBCSharedBlockState()
        state.head_block_residual = before
        hook = cast("Any", FBCHeadBlockHook(cast("Any", SimpleNamespace(get_state=lambda state=state: state)), 0.05))
        vote = CacheVote(torch.nn.Identity(), cast("Communicator", None), [], StepClock())
        for after in (before * (1 + change), before + change):
            assert vote._decide(hook, after) is hook._should_compute_remaining_blocks(after)
