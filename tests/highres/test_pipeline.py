"""As a user has it: one device or several, the same large image, and messages before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar import ParallelPipeline, Plan, PlanError, StructureGuidance
from patchpar.models.info import describe
from patchpar.pipeline.validate import check_plan, check_plan_for
from patchpar.strategies import parse_strategy, resolve_strategy
from patchpar.strategies.structure.patch_inputs import pack
from tests.breadth import first_of
from tests.tensors import noise, relative
from tests.tiny import build

from .generation import Case, alone, plain

CASE = Case(options={"masked": True, "lag": 1})
LIMIT = 1e-5


@pytest.fixture(scope="module")
def one() -> Iterator[ParallelPipeline]:
    with ParallelPipeline(build("sd").pipe, devices="cpu:1", plan=Plan(strategy=CASE.strategy)) as pipe:
        pipe.set_progress_bar_config(disable=True)
        yield pipe


def call(**changed: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    arguments = build("sd").call_kwargs | CASE.arguments | {"num_inference_steps": CASE.steps, "generator": generator}
    return arguments | {"output_type": "latent"} | changed


def test_one_device(one: ParallelPipeline) -> None:
    """The strategy works there too; another plan takes it out without a trace, and back."""
    got: Tensor = one(**call()).images
    assert relative(got, alone(CASE)) < LIMIT
    one.plan = Plan()
    assert torch.equal(one(**call()).images, plain(CASE))
    one.plan = Plan(strategy=CASE.strategy)
    assert torch.equal(one(**call()).images, got)


@pytest.mark.parametrize("options", [{"guide": "flow", "switch": 0.9}, {"preset": "paper", "shared_noise": 0.0}])
def test_prompts_of_the_same_seed_are_no_branches_of_guidance(options: dict[str, Any]) -> None:
    """Without guidance: each has its own guide, and its own words in the mask."""
    prompts, case = ["a red house", "two trees at night"], Case(options=options)
    with ParallelPipeline(build("sd").pipe, devices="cpu:1", plan=Plan(strategy=case.strategy)) as pipe:
        pipe.set_progress_bar_config(disable=True)
        given = [{"prompt": each, "generator": [torch.Generator().manual_seed(0)]} for each in prompts]
        alone = [pipe(**call(guidance_scale=1.0, **each)).images for each in given]
        seeds = [torch.Generator().manual_seed(0) for _ in prompts]
        together: Tensor = pipe(**call(guidance_scale=1.0, prompt=prompts, generator=seeds)).images
    assert relative(together, torch.cat(alone)) < LIMIT
    assert relative(*alone) > 1e-3


@pytest.mark.parametrize("options", [{"guide": "flow", "switch": 0.9}, {"preset": "paper", "shared_noise": 0.0}])
def test_prompts_of_the_same_seed_are_none_in_calls_of_their_own(options: dict[str, Any]) -> None:
    """Pipelines with `true_cfg_scale` call the denoiser for each branch. Flow matching begins with noise alone."""
    start, prompts = pack(noise(1, 4, 16, 16)), ["a red house", "two trees at night"]

    def generated(prompt: list[str]) -> Tensor:
        given = {"prompt": prompt, "negative_prompt": ["fog"] * len(prompt), "latents": start.repeat(len(prompt), 1, 1)}
        arguments = Case().arguments | {"true_cfg_scale": 3.0} | given
        return alone(Case(pipeline="flux", options=options, steps=4, arguments=arguments))

    each = [generated([prompt]) for prompt in prompts]
    assert relative(generated(prompts), torch.cat(each)) < LIMIT
    assert relative(*each) > 1e-3


@pytest.mark.breadth
def test_two_devices() -> None:
    plan = Plan(patch=2, strategy=CASE.strategy)
    with ParallelPipeline(build("sd").pipe, devices="cpu:2", plan=plan) as pipe:
        pipe.set_progress_bar_config(disable=True)
        assert relative(pipe(**call()).images, alone(CASE)) < LIMIT
        run = pipe.last_run
        assert run is not None
        assert all(rank.bytes_sent["prediction"] > 0 for rank in run.ranks)
        image = pipe(**call(output_type="pil")).images[0]
        assert image.size == (128, 128)
        teams = Case(options={"bands": 2}, arguments=CASE.arguments | {"guidance_scale": 1.0})  # the anchor is one unit
        pipe.plan = Plan(patch=2, strategy=teams.strategy)
        assert relative(pipe(**call(guidance_scale=1.0)).images, alone(teams)) < LIMIT
        assert pipe.last_run is not None
        assert all(rank.bytes_sent["kv"] > 0 for rank in pipe.last_run.ranks)
        windows, seen = Case(options={"switch": 0.9}, arguments=teams.arguments), list[Tensor]()
        pipe.plan, want = Plan(patch=2, strategy=windows.strategy), alone(windows)
        assert relative(pipe(**call(guidance_scale=1.0)).images, want) < LIMIT
        assert all(rank.bytes_sent["latents"] > 0 for rank in pipe.last_run.ranks)  # none had all before the last step
        looking = {"callback_on_step_end": lambda pipe, step, time, tensors: seen.append(tensors["latents"]) or {}}
        assert relative(pipe(**call(guidance_scale=1.0, **looking)).images, want) < LIMIT
        assert all("latents" not in rank.bytes_sent for rank in pipe.last_run.ranks)
        assert len(seen) == windows.steps
        assert all(latents.isfinite().all() for latents in seen)


SKIPPING = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 0.9}


@pytest.mark.parametrize(
    ("name", "given"), first_of([("sd", {}), ("flux", {}), ("sd3", SKIPPING)], ("flux", {}), ("sd3", SKIPPING))
)
def test_calls_of_which_ranks_need_every_prediction(name: str, given: dict[str, Any]) -> None:
    """Latents that are shown after each step, and guidance that calls the denoiser once more with other branches."""
    tiny, strategy = build(name), Case(options={"switch": 0.9}).strategy
    arguments = tiny.call_kwargs | Case().arguments | {"num_inference_steps": 4, "output_type": "latent"} | given
    found: dict[int, list[Tensor]] = {}
    for ranks in (1, 2):
        seen = found[ranks] = []
        plan = Plan(patch=ranks, strategy=strategy)
        with ParallelPipeline(build(name).pipe, devices=f"cpu:{ranks}", plan=plan) as pipe:
            pipe.set_progress_bar_config(disable=True)
            if not given:
                pipe.on_latents = lambda step, steps, latents, seen=seen: seen.append(latents)
            seen.append(pipe(**arguments, generator=torch.Generator().manual_seed(0)).images)
    assert len(found[1]) == (1 if given else 5)
    assert all(relative(*each) < LIMIT for each in zip(found[2], found[1], strict=True))


def test_messages(one: ParallelPipeline) -> None:
    """With the value, the limit, the way out, and before a rank works."""
    with pytest.raises(PlanError, match=r"64 x 80 pixels are less than 1\.42 times the native size of 64 x 64: plain"):
        one(**call(height=64, width=80))
    model = describe(build("sd").pipe)
    with pytest.raises(PlanError, match=r"distributes the guidance branches itself.*patch=4"):
        check_plan(model, Plan(cfg=2, patch=2, strategy=CASE.strategy))
    with pytest.raises(PlanError, match=r"4 patches and then 9 windows, of 2 guidance branches.*19 ranks.*at most 18"):
        check_plan_for(model, Plan(patch=19, strategy=CASE.strategy), call())
    own = build("sd").pipe.scheduler
    one.scheduler = type(own)(thresholding=True)
    with pytest.raises(PlanError, match="thresholding=False"):
        one(**call())
    one.scheduler = own


def test_options_as_text() -> None:
    """From a command line, and back."""
    strategy = parse_strategy("structure:preset=paper,lag=1,masked=false")
    assert strategy == StructureGuidance(preset="paper", lag=1, masked=False)
    assert parse_strategy(str(strategy)) == strategy
    assert resolve_strategy("structure") == StructureGuidance()
    assert str(StructureGuidance()) == "structure"
