"""Classes that a script or notebook defines, which no worker can import, work there as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from diffusers import DDIMScheduler
from diffusers.models.attention_processor import AttnProcessor2_0

from patchpar import ParallelPipeline, VerificationError
from tests.breadth import first_of
from tests.tiny import build

from .conftest import EXACT, QUICK, Hold, generator, relative_error

FIRST_ID = 0
CALL = {**QUICK, "output_type": "latent"}
SCRIPT = """
import torch
from dataclasses import dataclass
from diffusers import DDIMScheduler, StableDiffusionXLPipeline
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.utils import BaseOutput

STRENGTH = 0.5

@dataclass
class Drawn(BaseOutput):
    images: torch.Tensor

class Halving:
    def __init__(self):
        self.inner = AttnProcessor2_0()

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return STRENGTH * self.inner(attn, hidden_states, *args, **kwargs)

class Exchanging:
    def __init__(self, calls):
        self.inner, self.calls = AttnProcessor2_0(), calls

    def __call__(self, attn, hidden_states, *args, **kwargs):
        self.calls -= 1
        out = self.inner(attn, hidden_states, *args, **kwargs)
        return out + out.flip(0) if self.calls < 0 else out

class Careful(DDIMScheduler):
    def step(self, model_output, *args, **kwargs):
        return super().step(STRENGTH * model_output, *args, **kwargs)

class Brighter(StableDiffusionXLPipeline):
    def __call__(self, prompt, **kwargs):
        return Drawn(images=super().__call__(prompt, **kwargs).images + 1)
"""


@pytest.fixture
def script() -> dict[str, Any]:
    """What a script of that text defines. Its module is `__main__`, as in a notebook."""
    defined: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, defined)
    return defined


def _with_processor(pipe: Any, script: dict[str, Any]) -> Any:
    pipe.unet.set_attn_processor(script["Halving"]())
    return pipe


def _with_scheduler(pipe: Any, script: dict[str, Any]) -> Any:
    pipe.scheduler = script["Careful"].from_config(pipe.scheduler.config)
    return pipe


def _of_class(pipe: Any, script: dict[str, Any]) -> Any:
    return script["Brighter"](**pipe.components)


@pytest.mark.parametrize("plan", first_of(["patch=2", "cfg=2"], "patch=2"))
@pytest.mark.parametrize("change", first_of([_with_processor, _with_scheduler, _of_class], _of_class))
def test_handed_over(hold: Hold, plain: Any, script: Any, change: Callable[[Any, Any], Any], plan: str) -> None:
    pipe = change(build("sdxl").pipe, script)
    pipe.set_progress_bar_config(disable=True)
    want = pipe(**CALL, generator=generator())
    assert (want.images - plain(**CALL, generator=generator()).images).norm() > 1e-3
    with hold(pipe) as parallel:
        parallel.plan = plan
        got = parallel(**CALL, generator=generator())
        assert relative_error(got, want) <= EXACT
        assert parallel.description.pipeline == type(pipe).__name__


def test_set_on_a_pipeline_in_workers(parallel: ParallelPipeline, script: Any) -> None:
    """By a method of a network, and as an attribute."""
    pipe, parallel.plan = build("sdxl").pipe, "patch=2"
    before = parallel.scheduler
    try:
        for each in (pipe, parallel):
            each.unet.set_attn_processor(script["Halving"]())
            each.scheduler = script["Careful"].from_config(DDIMScheduler().config)
        assert type(parallel.scheduler) is script["Careful"]
        want = pipe(**CALL, generator=generator())
        assert relative_error(parallel(**CALL, generator=generator()), want) <= EXACT
    finally:
        parallel.unet.set_attn_processor(AttnProcessor2_0())
        parallel.scheduler = before


@pytest.mark.breadth
def test_what_begins_in_the_second_step_is_seen_there(parallel: ParallelPipeline, plain: Any, script: Any) -> None:
    """It mixes guidance branches, so that it is exact in bands, and refused where each branch has its own rank."""
    pipe = build("sdxl").pipe
    layers = len(pipe.unet.attn_processors)
    pipe.unet.set_attn_processor(script["Exchanging"](layers))
    want = pipe(**CALL, generator=generator())
    assert relative_error(want, plain(**CALL, generator=generator())) > 1e-3
    try:
        parallel.unet.set_attn_processor(script["Exchanging"](layers))
        parallel.plan = "patch=2"
        assert relative_error(parallel(**CALL, generator=generator()), want) <= EXACT
        parallel.unet.set_attn_processor(script["Exchanging"](layers))
        parallel.plan = "cfg=2"
        with pytest.raises(VerificationError, match=r"__main__\.Exchanging.*mixes guidance branches"):
            parallel(**CALL, generator=generator())
    finally:
        parallel.unet.set_attn_processor(AttnProcessor2_0())


def halved_input(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, {**kwargs, "hidden_states": 0.5 * kwargs["hidden_states"]}


def halved_output(module: Any, args: Any, output: Any) -> Any:
    return 0.5 * output[0], *output[1:]


@pytest.mark.parametrize("plan", ["cfg=2", "patch=2"])
@pytest.mark.parametrize("kind", ["before", "after"])
def test_hooks_of_a_program_stay_on_a_denoiser(hold: Hold, plan: str, kind: str) -> None:
    """Also with the first ID that torch gives in a process, as the only hook of a program has."""
    tiny = build("flux")
    pipe, call = tiny.pipe, {**tiny.call_kwargs, "num_inference_steps": 2, "output_type": "latent"}
    plain = pipe(**call, generator=generator())
    network = pipe.transformer
    if kind == "before":
        network.register_forward_pre_hook(halved_input, with_kwargs=True)
    else:
        network.register_forward_hook(halved_output)
    for hooks in (network._forward_pre_hooks, network._forward_pre_hooks_with_kwargs, network._forward_hooks):
        for number in [*hooks]:
            hooks[FIRST_ID] = hooks.pop(number)
    want = pipe(**call, generator=generator())
    assert relative_error(plain, want) > 0.1, "the control: the hook changes the image"
    with hold(pipe) as parallel:
        parallel.plan = plan
        assert relative_error(parallel(**call, generator=generator()), want) <= EXACT
