"""Caches of diffusers are known however they were put in: by `enable_cache`, or by a function."""

from __future__ import annotations

from typing import Any, cast

import pytest
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import apply_first_block_cache, apply_pyramid_attention_broadcast

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.step_caches import CacheVote, refuse_caches
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
