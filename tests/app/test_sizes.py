"""Sizes by ratio have the area that a model was trained at, and every preset's plan can run them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from app.defaults import Defaults, defaults_of
from app.page import build
from app.presets import presets_for
from app.sizes import RATIOS, size_of_ratio, unit_of
from patchpar import Plan, PlanError, StructureGuidance
from patchpar.models.info import describe
from patchpar.pipeline.validate import check_call, check_plan_for
from tests.tiny import build as build_tiny

from .app_states import state_of

SIDES = (64, 256, 512, 768, 1024)


def test_those_of_a_large_model_are_what_it_was_trained_at() -> None:
    """SDXL's table of sizes (arXiv:2307.01952, appendix I)."""
    assert [size_of_ratio(name, Defaults()) for name in RATIOS] == [
        (1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768), (768, 1344)
    ]  # fmt: skip
    assert size_of_ratio("16:9", Defaults(), times=2) == (2688, 1536)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", RATIOS)
def test_area_and_ratio_are_near(side: int, name: str) -> None:
    known = Defaults(height=side, width=side)
    width, height = size_of_ratio(name, known)
    assert width % unit_of(known) == height % unit_of(known) == 0
    if side > 64:  # whose sides cannot be shorter
        assert width * height == pytest.approx(side * side, rel=0.16)
        assert width / height == pytest.approx(RATIOS[name], rel=0.13)


def test_a_grid_that_is_no_divisor_is_kept() -> None:
    width, height = size_of_ratio("3:2", Defaults(grid=24))
    assert width % 192 == height % 192 == 0
    with pytest.raises(PlanError, match=r"ratio '7:5': choose one of 1:1, 4:3"):
        size_of_ratio("7:5", Defaults())


@pytest.mark.parametrize("kind", ["sdxl", "sd3", "flux"])
def test_every_preset_can_run_them(kind: str) -> None:
    model, devices = describe(build_tiny(kind).pipe), 4
    known = defaults_of("org/name", model)
    for name in RATIOS:
        width, height = size_of_ratio(name, known)
        call = {"prompt": "a fox", "height": height, "width": width, "guidance_scale": 4.0}
        call |= {"negative_prompt": "fog", "true_cfg_scale": 4.0} if kind == "flux" else {}
        check_call(model, call)
        for preset in presets_for(devices):
            plan = preset.plan(devices)
            if isinstance(plan, Plan) and not isinstance(plan.strategy, StructureGuidance):
                check_plan_for(model, plan, call)
    with pytest.raises(PlanError, match="multiple of"):  # the control
        check_call(model, {"prompt": "a fox", "height": 100, "width": 100})


def test_a_button_sets_both_sides() -> None:
    with closing(state_of()) as state:
        page = build(state)
        wide = [fn for fn in page.fns.values() if getattr(fn.fn, "__name__", "") == "size_16_9"]
        assert len(wide) == 4  # of Image, Compare, High resolution and Stream
        values: list[Any] = sorted(fn.fn() for fn in wide)
        assert values == [(352, 192)] * 3 + [(704, 384)]
        assert all([each.label for each in fn.outputs] == ["Width", "Height"] for fn in wide)
