"""Networks keep nothing of a call that fails: the next one gives the image of plain diffusers.

Pipelines with perturbed-attention guidance (arXiv:2403.17377) put processors into the denoiser when a call begins, and
take them away at its end, which a call that fails or is cancelled does not reach.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from patchpar import ParallelPipeline
from patchpar.errors import PlanError, WorkerOutOfMemory
from tests.tiny import build

from .conftest import EXACT, QUICK, Hold, generator, relative_error
from .odd import LacksMemory

PERTURBED = {**QUICK, "output_type": "latent", "pag_scale": 3.0}
WITHOUT = {**QUICK, "output_type": "latent", "pag_scale": 0.0}


def perturbed() -> Any:
    pipe = diffusers.AutoPipelineForText2Image.from_pipe(build("sdxl").pipe, enable_pag=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def fails(*_: Any) -> Any:
    raise ArithmeticError("not this step")


@pytest.mark.parametrize("plan", ["cfg=2", "patch=2"])
def test_processors_of_a_call_that_failed_are_not_those_of_the_next(hold: Hold, plan: str) -> None:
    """With two branches they would take the one with the prompt for the perturbed one, without a word."""
    want = perturbed()(**WITHOUT, generator=generator())
    with hold(perturbed()) as pipe:
        pipe.plan = plan
        with pytest.raises(ArithmeticError, match="not this step"):
            pipe(**PERTURBED, guidance_scale=0.0, generator=generator(), callback_on_step_end=fails)
        assert relative_error(pipe(**WITHOUT, generator=generator()), want) <= EXACT


def test_processors_of_a_call_that_was_refused_are_not_those_of_the_next(hold: Hold) -> None:
    with hold(perturbed()) as pipe:
        pipe.plan = "cfg=2"
        with pytest.raises(PlanError, match="3 branches"):
            pipe(**PERTURBED, generator=generator())
        pipe(**WITHOUT, generator=generator())
        assert not pipe.pag_attn_processors


def test_processors_that_a_callback_has_set_stay_after_a_failure(parallel: ParallelPipeline) -> None:
    """What a callback has changed holds, also where its call fails later."""

    def sets(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step:
            raise ArithmeticError("not this step")
        pipe.unet.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
        return {}

    parallel.plan = "cfg=2"
    before = parallel.unet.attn_processors
    with pytest.raises(ArithmeticError, match="not this step"):
        parallel(**QUICK, generator=generator(), callback_on_step_end=sets)
    kinds = {type(each).__name__ for each in parallel.unet.attn_processors.values()}
    parallel.unet.set_attn_processor(before)
    assert kinds == {"AttnProcessor"}


def test_a_vae_that_was_cast_for_a_call_that_failed_is_cast_back(hold: Hold, tmp_path: Path) -> None:
    """Pipelines cast a VAE that overflows in float16 to float32, and back when it has decoded."""
    room = tmp_path / "room"

    def halves() -> Any:
        pipe = build("sdxl").pipe.to(torch.float16)
        pipe.vae.register_to_config(force_upcast=True)
        pipe.vae.decoder.conv_out = LacksMemory(pipe.vae.decoder.conv_out, room)
        return pipe

    call = {**QUICK, "output_type": "pt"}
    room.write_text(str(10**9))
    want = halves()(**call, generator=generator())
    with hold(halves()) as pipe:
        pipe.plan = "cfg=2"
        room.write_text("0")
        with pytest.raises(WorkerOutOfMemory, match="do not fit"):
            pipe(**call, generator=generator())
        room.write_text(str(10**9))
        assert relative_error(pipe(**call, generator=generator()), want) <= 1e-2
        assert pipe.vae.dtype == torch.float16
