"""The guide of a cascade is the image that the model draws at native size, whatever becomes of the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.strategies.structure.guide_trajectory import followed
from patchpar.strategies.structure.options import StructureGuidance
from patchpar.strategies.structure.patch_inputs import pack, unpack
from tests.breadth import first_of
from tests.tensors import noise, relative
from tests.tiny import Tiny, latents

from .generation import Case, alone, large, plain, prepared, together

STEPS = 6


def before_the_last_step(tiny: Tiny, found: list[Tensor]) -> Any:
    """A callback that keeps the latents with which the last step begins."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == STEPS - 2:
            found.append(values["latents"])
        return {}

    return callback


@pytest.mark.parametrize("guidance", first_of([7.5, 1.0], 7.5))
def test_the_guide_is_the_native_image(guidance: float) -> None:
    """Begun by the anchor, whose first stage is the native image's when it alone is followed, and led on by DDIM."""
    case = Case(scheduler=diffusers.DDIMScheduler)
    start, call = noise(1, 4, 16, 16), {"steps": STEPS, "guidance_scale": guidance}
    tiny, native = prepared(case), list[Tensor]()
    own = {"latents": start[..., ::2, ::2].contiguous(), "height": 64, "width": 64}
    latents(tiny, **call, **own, callback_on_step_end=before_the_last_step(tiny, native))
    strategy = StructureGuidance(native=64, switch=0.6, guide="flow")
    displayed: list[Tensor] = []
    with large(tiny, strategy, None, Axis("patch")) as found:
        flow = found._detail._flow
        assert flow is not None
        original = flow.guide_input
        flow.guide_input = lambda *args: displayed.append(original(*args)) or displayed[-1]  # type: ignore[method-assign]
        latents(tiny, **call, latents=start, height=128, width=128)
    assert len(displayed) == 4  # of six steps those below 0.6
    assert relative(displayed[-1][:1], native[0]) < 1e-4


@pytest.mark.parametrize("guidance", first_of([3.0, 1.0], 3.0))
def test_the_guide_of_packed_tokens(guidance: float) -> None:
    """FLUX hands its scheduler rows of tokens and calls for each branch: the guide is the native image all the same.

    Noise levels that do not depend on the number of tokens, or the native image would be another one.
    """
    tiny, native, displayed = prepared(Case(pipeline="flux")), list[Tensor](), list[Tensor]()
    config = tiny.pipe.scheduler.config
    tiny.pipe.scheduler = type(tiny.pipe.scheduler).from_config(config, use_dynamic_shifting=False)
    start, call = noise(1, 4, 16, 16), {"steps": STEPS, "true_cfg_scale": guidance}
    own = {"latents": pack(start[..., ::2, ::2]), "height": 64, "width": 64}
    latents(tiny, **call, **own, callback_on_step_end=before_the_last_step(tiny, native))
    with large(tiny, StructureGuidance(native=64, switch=0.9, guide="flow"), None, Axis("patch")) as found:
        flow = found._detail._flow
        assert flow is not None
        original = flow.guide_input
        flow.guide_input = lambda *args: displayed.append(original(*args)) or displayed[-1]  # type: ignore[method-assign]
        latents(tiny, **call, latents=pack(start), height=128, width=128)
    want = unpack(native[0], 4, 4)
    assert relative(displayed[-1], want) < 1e-4
    assert relative(displayed[0], want) > 1e-2  # it has moved
    wrong = native[0].reshape(want.shape)  # the negative control: tokens taken for rows of a map
    assert relative(displayed[-1], wrong) > 1e-1


@pytest.mark.parametrize("pipeline", first_of(["flux", "sd3"], "flux"))
def test_the_guide_on_two_ranks(pipeline: str) -> None:
    """The image is that of one rank, from the first step with windows to the last, and the guide's own."""
    case = Case(pipeline=pipeline, options={"guide": "flow", "switch": 0.9}, steps=4)
    want = alone(case)
    assert all(relative(generated.latents, want) < 1e-5 for generated in together(case, 2))
    assert relative(alone(replace(case, options={"switch": 0.9})), want) > 1e-4


def test_the_guide_leads() -> None:
    """A guide makes another image than the anchor, and that is not the plain one."""
    options = {"switch": 0.7}
    by_flow, by_anchor = (alone(Case(options=options | {"guide": each})) for each in ("flow", "anchor"))
    assert relative(by_flow, by_anchor) > 1e-4
    assert relative(by_flow, plain(Case())) > 1e-2


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_weights_of_branches_are_found(branches: int) -> None:
    """For each image of a batch, and where branches are nearly alike."""
    weights = torch.tensor([[3.5], [-2.0], [-0.5]])[:branches] + torch.arange(2.0)
    for differ in (1.0, 1e-3):
        known = noise(1, 2, 4, 6, 6) + differ * noise(branches, 2, 4, 6, 6, seed=1)
        others = noise(1, 2, 4, 3, 3, seed=2) + differ * noise(branches, 2, 4, 3, 3, seed=3)
        summed, want = ((weights[:, :, None, None, None] * x).sum(0) for x in (known, others))
        got = followed(summed, known.flatten(0, 1), others.flatten(0, 1))
        assert torch.allclose(got, want, atol=2e-3, rtol=1e-3)


def test_what_a_guide_cannot_follow() -> None:
    known = noise(2, 4, 6, 6)
    with pytest.raises(UnsupportedModel, match="not guide by a weighted sum of its branches"):
        followed(known[:1] * known[1:].sign(), known, known)
    with pytest.raises(PlanError, match="HeunDiscreteScheduler is of second order"):
        alone(Case(options={"guide": "flow"}, scheduler=diffusers.HeunDiscreteScheduler))
    with pytest.raises(PlanError, match="does not change the latent of guide=flow"):
        StructureGuidance(guide="flow", renoised=True)


def test_nothing_is_left_behind() -> None:
    tiny = prepared(Case())
    before = set(vars(tiny.pipe.scheduler))
    with large(tiny, StructureGuidance(native=64, guide="flow"), None, Axis("patch")):
        assert "step" in vars(tiny.pipe.scheduler)
    assert set(vars(tiny.pipe.scheduler)) == before
