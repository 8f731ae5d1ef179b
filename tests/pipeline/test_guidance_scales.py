"""From which guidance scale on a pipeline guides is known before the call: as its own property says during the call."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers.hooks import PyramidAttentionBroadcastConfig

from benchmarks.coverage.pipelines.language import ENTRIES
from patchpar import Plan, PlanError, UnsupportedModel
from patchpar.models.guiders import GUIDES
from patchpar.models.info import describe
from patchpar.pipeline.auto_plan import choose
from patchpar.pipeline.validate import check_plan_for
from tests.breadth import first_of
from tests.tiny import BUILDERS, build
from tests.tiny.cascade_pipelines import cascade

from .conftest import EXACT, Hold, generator, relative_error

SCALES = (0.0, 0.5, 1.0, 1.5, 5.0)


def says(pipe: Any, scale: float) -> bool | None:
    """What the pipeline's property says in a call with a scale; None without one that looks at scales."""
    found = getattr(type(pipe), GUIDES, None)
    names = found.fget.__code__.co_names if isinstance(found, property) and found.fget is not None else ()
    for name in (each for each in names if each.endswith("guidance_scale")):
        setattr(pipe, f"_{name.removeprefix('_')}", scale)
    return bool(getattr(pipe, GUIDES)) if any(each.endswith("guidance_scale") for each in names) else None


@pytest.mark.parametrize("name", first_of(BUILDERS, "sd", "zimage", "svd", "ltx2", "instruct_pix2pix"))
def test_descriptions_agree_with_the_pipeline(name: str) -> None:
    tiny = build(name)
    model = describe(tiny.pipe)
    scales = [each for each in model.parameters if each.endswith("guidance_scale") and each != "true_cfg_scale"]
    for scale in SCALES:
        wanted = says(tiny.pipe, scale)
        given = tiny.call_kwargs | dict.fromkeys(scales, scale)
        assert wanted is None or model.guided(given) is wanted, scale


def test_guidance_of_a_scale_of_one(hold: Hold) -> None:
    """Z-Image guides above 0; its branches are then on two ranks."""
    tiny = build("zimage")
    call = tiny.call_kwargs | {"num_inference_steps": 2, "output_type": "latent", "guidance_scale": 1.0}
    want = tiny.pipe(**call, generator=generator())
    without = tiny.pipe(**call | {"guidance_scale": 0.0}, generator=generator())
    assert relative_error(without, want) > 100 * EXACT
    with hold(tiny.pipe) as parallel:
        for plan in ("auto", "cfg=2"):
            parallel.plan = plan
            assert relative_error(parallel(**call, generator=generator()), want) <= EXACT
            assert parallel.last_run is not None
            assert parallel.last_run.plan.cfg == 2
        with pytest.raises(PlanError, match="pass guidance_scale > 0 "):
            parallel(**call | {"guidance_scale": 0.0}, generator=generator())


def test_a_scale_for_the_image_that_turns_guidance_off(hold: Hold) -> None:
    """InstructPix2Pix guides by both scales or by none."""
    tiny = build("instruct_pix2pix")
    call = tiny.call_kwargs | {"num_inference_steps": 2, "output_type": "latent", "image_guidance_scale": 0.5}
    model = describe(tiny.pipe)
    assert (model.branches(tiny.call_kwargs), model.branches(call)) == (3, 1)
    want = tiny.pipe(**call, generator=generator())
    with hold(tiny.pipe) as parallel:
        assert relative_error(parallel(**call, generator=generator()), want) <= EXACT


def test_a_distilled_model_that_never_guides(hold: Hold) -> None:
    """Whatever the scale of the call, whose default is that of the model before it was distilled."""
    (entry,) = (each for each in ENTRIES if each.name == "Flux2KleinPipeline")
    pipe, call = entry.make()
    model = describe(pipe)
    assert model.branches(call) == 2
    pipe.register_to_config(is_distilled=True)
    model = describe(pipe)
    assert model.branches(call) == 1
    assert choose(model, 2, call).plan.cfg == 1
    with pytest.raises(PlanError, match="Flux2KleinPipeline of a distilled model has none at any scale"):
        check_plan_for(model, Plan(cfg=2), call)
    want = pipe(**call, generator=generator())
    with hold(pipe) as parallel:
        assert relative_error(parallel(**call, generator=generator()), want) <= EXACT


@pytest.mark.parametrize(
    ("pipe", "call", "way_out"),
    [
        (lambda: build("sd").pipe, {"guidance_scale": 1.0}, r"pass guidance_scale > 1 \(with a negative prompt"),
        (lambda: build("flux").pipe, {"guidance_scale": 3.5}, "pass true_cfg_scale > 1 and a negative_prompt, or"),
        (lambda: build("svd").pipe, {"max_guidance_scale": 1.0}, "pass max_guidance_scale > 1"),
        (lambda: build("flux2").pipe, {"guidance_scale": 4.0}, "a distilled model has none at any scale: use another"),
        (lambda: cascade()[0], {}, "pass decoder_guidance_scale > 1"),
        (lambda: build("ddpm").pipe, {}, "DDPMPipeline has none in any call, or use cfg=1"),
    ],
    ids=["sd", "flux", "svd", "flux2", "cascade", "ddpm"],
)
def test_the_way_to_guidance_is_that_of_the_pipeline(pipe: Any, call: dict[str, Any], way_out: str) -> None:
    with pytest.raises(PlanError, match=way_out):
        check_plan_for(describe(pipe()), Plan.parse("cfg=2"), {"prompt": "a red house", **call})


def test_a_cache_that_counts_the_calls_of_both_branches(hold: Hold) -> None:
    """Plain diffusers reads one branch's attention in the other; with cfg=2 each rank would have its own."""
    tiny = build("flux")
    pipe, call = tiny.pipe, {**tiny.call_kwargs, "num_inference_steps": 3, "output_type": "latent"}
    want = pipe(**call, generator=generator())
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    )
    with hold(pipe) as parallel:
        parallel.plan = "cfg=2"
        parallel.transformer.enable_cache(config)
        with pytest.raises(
            UnsupportedModel, match=r"PyramidAttentionBroadcastConfig cannot be used with cfg=2.*data=N"
        ):
            parallel(**call, generator=generator())
        parallel.transformer.disable_cache()
        assert relative_error(parallel(**call, generator=generator()), want) <= EXACT
