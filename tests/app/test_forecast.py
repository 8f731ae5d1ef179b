"""The plan tab says what the package itself would do, and why it refuses the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.forecast import CallToPlan, PlanOffer, forecast, link_estimate, plan_diagram, plans, rank_regions
from patchpar import Plan, PlanError, StructureGuidance
from patchpar.comm.trace import RankTrace, TraceEvent
from patchpar.models.info import PipelineInfo
from patchpar.pipeline.auto_plan import choose
from patchpar.pipeline.rank_stats import RankStats, StepStats
from patchpar.pipeline.report import Run
from patchpar.plan.link_model import LinkModel

MODEL = PipelineInfo(
    pipeline="StableDiffusionXLPipeline",
    module="diffusers",
    denoisers=("unet (UNet2DConditionModel)",),
    splits_into_bands=True,
    splits_into_tokens=False,
    total_stride=4,
    vae_scale=8,
    size_unit=8,
    parameters={"prompt": None, "guidance_scale": 5.0, "height": None, "width": None, "num_inference_steps": 50},
    takes_any=False,
    distilled=False,
    default_size=(1024, 1024),
    methods=frozenset(),
    networks={},
)
CALL = CallToPlan(devices=8, height=1024, width=1024, guided=True)


def test_what_is_chosen_is_what_auto_chooses() -> None:
    found = forecast(MODEL, CALL)
    request = choose(MODEL, 8, CALL.arguments(MODEL.parameters))
    assert (found.chosen, found.reason) == (request.plan, request.reason)
    assert found.chosen == found.offers[0].plan


@pytest.mark.parametrize("devices", [1, 2, 6, 7, 8])
def test_every_plan_takes_all_devices_once(devices: int) -> None:
    found = list(plans(devices))
    assert len(set(found)) == len(found)
    assert all(plan.world_size == devices for plan in found)
    assert {plan.patch for plan in found} >= {devices}


def test_refusals_are_the_package_s_own_sentences() -> None:
    estimates = {str(offer.plan): offer.refusal for offer in forecast(MODEL, replace(CALL, guided=False)).offers}
    assert "this call uses none" in estimates["cfg=2,patch=4,strategy=exact"]
    assert estimates["patch=8,strategy=exact"] == ""
    small = {str(offer.plan): offer.refusal for offer in forecast(MODEL, replace(CALL, height=64, width=64)).offers}
    assert "use at most 2" in small["patch=8,strategy=exact"]


def test_guidance_that_goes_by_another_name() -> None:
    parameters = {"prompt": None, "true_cfg_scale": 1.0, "negative_prompt": None}
    model = replace(MODEL, parameters=parameters)
    assert [model.guided(replace(CALL, guided=on).arguments(parameters)) for on in (True, False)] == [True, False]


def test_large_images_are_reported_to_be_generated_in_windows() -> None:
    plan = Plan(patch=4, strategy=StructureGuidance())
    assert "windows of native size" in PlanOffer(plan=plan).work
    assert plan_diagram(plan, MODEL, (2048, 2048)) == ""


def test_ranks_lie_where_the_mesh_puts_them() -> None:
    plan = Plan(cfg=2, patch=2)
    assert rank_regions(plan, 128, 4) == [(0, 0, 64), (0, 64, 128), (1, 0, 64), (1, 64, 128)]
    displayed = plan_diagram(plan, MODEL, (1024, 1024))
    assert displayed.count("<rect") == 4
    assert "negative prompt" in displayed
    wide = plan_diagram(Plan(patch=4), MODEL, (512, 1024))
    assert len({part.split('"')[0] for part in wide.split('x="')[1:]}) >= 4  # side by side


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"devices": 0}, "devices 0"), ({"devices": 65}, "from 1 to 64"), ({"height": None}, "height None")],
)
def test_a_call_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(CALL, **changes)


def test_a_link_is_weighed_by_the_last_run() -> None:
    """Two steps of a second; in each a rank sends a megabyte and waits three times."""
    step = StepStats(bytes_sent={"kv": 10**6}, bytes_received={}, seconds_waited={})
    events = [TraceEvent("wait", "kv", "x", 0.0, 0.1)] * 6 + [TraceEvent("step", "", "s", 0.0, 1.0)] * 2
    rank = RankStats(
        rank=0,
        device="cpu",
        bytes_sent={"kv": 2 * 10**6},
        bytes_received={},
        seconds_waited={},
        steps=(step, step),
        trace=RankTrace(0, "cpu", 0.0, tuple(events)),
    )
    run = Run(plan=Plan(patch=2), seconds=2.0, ranks=(rank, replace(rank, rank=1)))
    message = link_estimate(run, LinkModel(latency=0.01, rate=1e8))
    assert "waited 3 times" in message
    assert "these messages take 0.040 s" in message
    assert "4% of such a step" in message
    assert "Generate an image on several devices first" in link_estimate(None, LinkModel())
