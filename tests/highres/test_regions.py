"""Ranks that hold only the latents that they need draw the image of one, and nobody else ever sees the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
from torch import Tensor
from torch.nn import functional as F

from patchpar.errors import UnsupportedModel
from patchpar.strategies.structure import needed_regions as regions
from patchpar.strategies.structure.after_guidance import AfterGuidance
from patchpar.strategies.structure.partial_prediction import PartialPrediction
from patchpar.strategies.structure.windows import Tiling
from tests.breadth import first_of
from tests.tensors import relative

from .generation import Case, alone, together

LIMIT = 1e-5
WINDOWS = {"switch": 0.9}  # windows in all steps but perhaps the first, which shows what guidance does
DDIM, EULER, SOLVER, HEUN = (
    diffusers.DDIMScheduler,
    diffusers.EulerDiscreteScheduler,
    diffusers.DPMSolverMultistepScheduler,
    diffusers.HeunDiscreteScheduler,
)
SQUARE = {"height": 128, "width": 128}
CASES: dict[str, tuple[int, Case]] = {
    "a solver with a memory": (3, Case(scheduler=SOLVER)),
    "nothing kept": (4, Case(scheduler=DDIM, options={"structure_strength": 0.0})),
    "its last time is 0": (2, Case(scheduler=EULER)),
    "two evaluations a step": (2, Case(scheduler=HEUN)),
    "a solver, nothing kept": (2, Case(scheduler=SOLVER, options={"structure_strength": 0.0})),
    "teams": (4, Case(scheduler=SOLVER, options={"bands": 2, "structure_strength": 0.0})),
    "teams for the guide": (8, Case(options={"bands": 2})),
    "the paper": (3, Case(options={"preset": "paper"})),
    "windows that touch and see one another": (2, Case(options={"margin": 0.0, "context": 0.25})),
    "the guide on two ranks": (7, Case(scheduler=DDIM)),
    "uneven sides": (3, Case(arguments={"height": 168, "width": 104})),
    "three times native": (4, Case(arguments={"height": 192, "width": 192}, scheduler=EULER)),
    "no guidance": (4, Case(arguments=SQUARE | {"guidance_scale": 1.0})),
    "stochastic": (3, Case(arguments=SQUARE | {"eta": 0.7}, scheduler=DDIM)),
    "to fill in": (3, Case(pipeline="sd_inpaint", arguments=SQUARE | {"strength": 0.99})),
    "from a picture": (3, Case(pipeline="sd_img2img", arguments={"strength": 0.99})),
    "sdxl": (2, Case(pipeline="sdxl", arguments={"height": 128, "width": 192})),
    "sd3": (3, Case(pipeline="sd3")),
    "packed, a call for each branch": (3, Case(pipeline="flux", arguments=SQUARE | {"true_cfg_scale": 3.0})),
}  # fmt: skip
ALWAYS = ("a solver with a memory",)


def with_windows(case: Case) -> Case:
    """Nearly all of its steps."""
    return replace(case, options=WINDOWS | case.options, steps=4)


@pytest.mark.parametrize("name", first_of(CASES, *ALWAYS))
def test_ranks_generate_the_image_of_one(name: str) -> None:
    """Though every one of them had no number in many places, from the first step with windows to the last but one."""
    world, case = CASES[name]
    case = with_windows(case)
    want = alone(case)
    generated = together(case, world)
    assert all(relative(each.latents, want) < LIMIT for each in generated)
    assert all(min(each.missing[1:-1]) > 0.05 and each.missing[-1] == 0 for each in generated)
    assert sum(each.sent_in(-1)["latents"] for each in generated) == (world - 1) * want.numel() * want.element_size()
    assert all("latents" not in step for each in generated for step in each.by_step[:-1])


WHOLE = {
    "somebody looks": Case(watched=True),
    "the guide of the last step": Case(options={"lag": 1}),
    "a guide of its own": Case(options={"guide": "flow"}),
    "guidance of the whole": Case(arguments=SQUARE | {"guidance_rescale": 0.7}),
}


@pytest.mark.breadth
@pytest.mark.parametrize("name", first_of(WHOLE, "somebody looks"))
def test_latents_that_are_whole_in_every_step(name: str) -> None:
    case = with_windows(WHOLE[name])
    want = alone(case)
    for generated in together(case, 2):
        assert relative(generated.latents, want) < LIMIT
        assert generated.missing == [0.0] * 4
        assert "latents" not in generated.bytes_sent


def test_a_pipeline_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It might look at any place of the latents."""
    monkeypatch.setattr("patchpar.strategies.structure.native_size.TESTED", ())
    assert all(generated.missing == [0.0] * 4 for generated in together(with_windows(Case()), 2))


ZONES = Tiling.zones
NOT_ENOUGH: dict[str, tuple[Any, str, Any]] = {
    "fewer samples of the guide": (regions, "AROUND", 0),
    "windows that never move": (Tiling, "zones", lambda self, *at, **of: ZONES(replace(self, moved=False), *at, **of)),
}


@pytest.mark.parametrize("name", first_of(NOT_ENOUGH, "fewer samples of the guide"))
def test_a_region_that_is_too_small_is_no_image(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what a rank lacks is no number, and that is said rather than drawn."""
    monkeypatch.setattr(*NOT_ENOUGH[name])
    with pytest.raises(UnsupportedModel, match="after the last step latents are NaN: each rank holds only"):
        together(with_windows(Case(scheduler=DDIM)), 3)


class Blurring(diffusers.DDIMScheduler):  # type: ignore[misc]
    """Its latents depend on those around them."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        sample, *rest = super().step(*args, **kwargs)
        blurred: Tensor = F.avg_pool2d(sample, 3, stride=1, padding=1)
        return blurred, *rest


@pytest.mark.breadth
def test_latents_that_depend_on_one_another() -> None:
    """They are refused by what they come to; where somebody looks they are drawn."""
    case = with_windows(Case(scheduler=Blurring))
    with pytest.raises(UnsupportedModel, match="after the last step latents are NaN"):
        together(case, 2)
    want = alone(case)
    assert all(relative(generated.latents, want) < LIMIT for generated in together(replace(case, watched=True), 2))


def test_steps_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image whose latents nobody made whole is not given out."""
    ended = AfterGuidance._ended

    def interrupted(self: AfterGuidance, result: Any) -> Any:
        self._pipe._interrupt = self._clock.evaluation == 2
        return ended(self, result)

    monkeypatch.setattr(AfterGuidance, "_ended", interrupted)
    with pytest.raises(UnsupportedModel, match="the pipeline ended before the last of its steps"):
        together(with_windows(Case()), 2)


@pytest.mark.breadth
def test_steps_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver remembers what was no number: it is not asked to go on."""
    regions_of = AfterGuidance._regions

    def early(self: AfterGuidance, part: PartialPrediction) -> Any:
        self._pipe._num_timesteps = 3  # of four
        return regions_of(self, part)

    monkeypatch.setattr(AfterGuidance, "_regions", early)
    with pytest.raises(UnsupportedModel, match="the pipeline continues after step 2, its last one"):
        together(with_windows(Case()), 2)
