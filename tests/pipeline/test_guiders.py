"""Pipelines whose guider says how many branches there are: known to plans, and split as guidance by a scale is."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers.guiders import AdaptiveProjectedMixGuidance, ClassifierFreeGuidance, SkipLayerGuidance

from benchmarks.coverage.pipelines.guided import ENTRIES
from patchpar import Plan, PlanError
from patchpar.models.info import describe
from patchpar.pipeline.validate import check_plan_for

from .conftest import EXACT, Hold, generator, relative_error


@pytest.fixture(scope="module")
def built() -> tuple[Any, dict[str, Any]]:
    """HunyuanImage, tiny, with what it is called with."""
    (entry,) = (each for each in ENTRIES if each.name == "HunyuanImagePipeline")
    return entry.make()


def disabled() -> Any:
    guider = ClassifierFreeGuidance(guidance_scale=5.0)
    guider.disable()
    return guider


def in_its_last_step() -> Any:
    """As a call leaves it: guidance has stopped there."""
    guider = ClassifierFreeGuidance(guidance_scale=5.0, stop=0.5)
    guider.set_state(step=9, num_inference_steps=10, timestep=None)
    return guider


@pytest.mark.parametrize(
    ("guider", "branches"),
    [
        (ClassifierFreeGuidance(guidance_scale=5.0), 2),
        (ClassifierFreeGuidance(guidance_scale=1.0), 1),
        (AdaptiveProjectedMixGuidance(), 2),
        (SkipLayerGuidance(guidance_scale=5.0, skip_layer_guidance_layers=[0]), 3),
        (in_its_last_step(), 2),
        (disabled(), 1),
        (None, 1),
    ],
)
def test_a_guider_says_how_many_branches_there_are(built: Any, guider: Any, branches: int) -> None:
    pipe, call = built
    before, pipe.guider = pipe.guider, guider
    try:
        model = describe(pipe)
    finally:
        pipe.guider = before
    assert model.branches(call) == branches
    if branches == 1:
        with pytest.raises(PlanError, match=r"uses none: set pipe\.guider to one that guides.*, or use cfg=1"):
            check_plan_for(model, Plan(cfg=2), call)
    else:
        check_plan_for(model, Plan(cfg=2), call)


def test_its_branches_are_on_several_ranks(built: Any, hold: Hold) -> None:
    pipe, call = built
    other = ClassifierFreeGuidance(guidance_scale=2.0)
    wanted = [pipe(**call, generator=generator())]
    before, pipe.guider = pipe.guider, other
    wanted.append(pipe(**call, generator=generator()))
    pipe.guider = before
    assert relative_error(*wanted) > 100 * EXACT
    with hold(pipe) as parallel:
        for plan in ("auto", "cfg=2"):
            parallel.plan = plan
            assert relative_error(parallel(**call, generator=generator()), wanted[0]) <= EXACT
            assert parallel.last_run is not None
            assert "cfg=2" in str(parallel.last_run.plan)
        parallel.guider = other
        assert relative_error(parallel(**call, generator=generator()), wanted[1]) <= EXACT
        parallel.guider = ClassifierFreeGuidance(guidance_scale=1.0)
        with pytest.raises(PlanError, match=r"set pipe\.guider"):
            parallel(**call, generator=generator())
