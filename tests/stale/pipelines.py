"""Whole pipelines under a strategy, image after image on the same ranks; and what the emulation makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from torch import Tensor

from benchmarks.emulation import Emulation
from patchpar.pipeline.messages import CallOptions, RandomState
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from patchpar.shard.unet.discover import ExchangeSites, discover
from tests import tiny
from tests.ranks import PoolRank

from .runs import Run, policy_of

SEED = 7
TALL = {"height": 152, "width": 120}  # 19 rows of latents: bands of different size
WIDE = {"height": 120, "width": 152}
SCHEDULERS = {
    "DDIM": diffusers.DDIMScheduler,
    "Euler ancestral": diffusers.EulerAncestralDiscreteScheduler,
    "DPM++ 2M": diffusers.DPMSolverMultistepScheduler,
    "Heun": diffusers.HeunDiscreteScheduler,
    "KDPM2": diffusers.KDPM2DiscreteScheduler,
    "LCM": diffusers.LCMScheduler,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCall:
    """One call of a pipeline. `unguided_after`, `fails_after`: what its callback does at the end of that step."""

    prompt: str = "a small red house"
    size: dict[str, int] = field(default_factory=lambda: TALL)
    steps: int = 4
    unguided_after: int | None = None
    fails_after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline, how it is shared, and with which scheduler."""

    plan: str
    scheduler: str = "DDIM"
    pipeline: str = "sd"
    exchange: str = "on"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """Final latents, on rank 0, and how many denoiser calls were exact and how many were not."""

    latents: Tensor | None
    exact_calls: int
    stale_calls: int


class CaseRunner:
    """One rank's engine with a tiny pipeline, fresh from the start, for images one after the other."""

    def __init__(self, engine: PipelineRunner, case: Case) -> None:
        self.engine, self.case = engine, case
        self.engine.restore()
        sites = known_sites(case.pipeline)
        self.engine.adopt(pipeline(case))
        self.options = CallOptions(plan=Plan.parse(case.plan), verify=False, random=RandomState(seed=SEED), quiet=True)
        self.engine.install(self.options.plan, verify=False)
        for patched in self.engine._installed.patched:
            patched.sites = sites
        self.engine.control(exchange=case.exchange)

    def generate(self, call: ImageCall) -> RankOutput:
        """One image."""
        torch.manual_seed(SEED)  # some schedulers draw without the caller's generator
        output = getattr(self.engine.generate(arguments(self.case, call), self.options), "output", None)
        stale_states = [patched.history for patched in self.engine._installed.patched if patched.history is not None]
        exact, stale = (sum(getattr(h, name) for h in stale_states) for name in ("exact_calls", "stale_calls"))
        return RankOutput(latents=None if output is None else output.images, exact_calls=exact, stale_calls=stale)


@cache
def built(name: str) -> tuple[tiny.Tiny, dict[str, Any]]:
    """A tiny pipeline and the settings of its own scheduler. Building takes longer than an image."""
    found = tiny.build(name)
    return found, dict(found.pipe.scheduler.config)


def pipeline(case: Case) -> Any:
    """The pipeline of a case, in one process."""
    found, settings = built(case.pipeline)
    found.pipe.scheduler = SCHEDULERS[case.scheduler].from_config(settings)
    return found.pipe


@cache
def known_sites(name: str) -> ExchangeSites:
    """Where its denoiser has seams. So does probing."""
    found, denoiser = built(name)[0], built(name)[0].denoiser
    seen: list[Any] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((args, kwargs))

    hook = denoiser.register_forward_pre_hook(note, with_kwargs=True)
    tiny.latents(found, steps=1, height=96, width=64)
    hook.remove()
    return discover(denoiser, denoiser.forward, *seen[0])


def arguments(case: Case, call: ImageCall, at_change: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """What the pipeline is called with. `at_change` is called where the batch becomes another."""

    def on_step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step + 1 == call.fails_after:
            raise ArithmeticError("this picture is not to be")
        if step + 1 == call.unguided_after:  # as diffusers' guide shows it
            pipe._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
            at_change()
        return tensors

    given = built(case.pipeline)[0].call_kwargs | {"prompt": call.prompt} | call.size
    return given | {
        "num_inference_steps": call.steps,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(SEED),
        "callback_on_step_end": on_step_end,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
    }


def generated(this: PoolRank, cases: Sequence[Case], calls: Sequence[ImageCall]) -> list[list[RankOutput]]:
    """All images of each case, one after the other. Needs all ranks of the pool; a plan may leave some idle."""
    with reset_engine(this) as engine:
        runners = (CaseRunner(engine, case) for case in cases)
        return [[runner.generate(call) for call in calls] for runner in runners]


@contextmanager
def reset_engine(this: PoolRank) -> Iterator[PipelineRunner]:
    """An engine that leaves the pipelines as they were."""
    engine = this.runner()
    try:
        yield engine
    finally:
        engine.restore()


def emulated(case: Case, call: ImageCall) -> Tensor:
    """Final latents as they are to be, from one process."""
    plan, pipe = Plan.parse(case.plan), pipeline(case)
    policy = policy_of(Run(strategy=str(plan.strategy), exchange=case.exchange))
    if policy.warmup_steps:
        policy = replace(policy, warmup_steps=policy.warmup_steps * pipe.scheduler.order)
    torch.manual_seed(SEED)
    split = "rows" if call.size["height"] >= call.size["width"] else "columns"
    sites = known_sites(case.pipeline)
    known = patch("benchmarks.emulation.oracle.discover", lambda *_: sites)
    with known, Emulation(pipe.unet, plan.patch, policy, split=split) as emulation:
        latents: Tensor = pipe(**arguments(case, call, emulation.reset)).images
    return latents


def plain(case: Case, call: ImageCall) -> Tensor:
    """Final latents of one process."""
    torch.manual_seed(SEED)
    latents: Tensor = pipeline(case)(**arguments(case, call)).images
    return latents


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happens to the pipeline between two images: another scheduler, or a method with its arguments."""

    scheduler: str | None = None
    method: str | None = None
    arguments: tuple[Any, ...] = ()

    def happen(self, engine: PipelineRunner) -> None:
        """On this rank."""
        if self.scheduler is not None:
            engine.set("scheduler", SCHEDULERS[self.scheduler].from_config(engine.pipe.scheduler.config))
        if self.method is not None:
            engine.apply(self.method, self.arguments, {})


Happening = ImageCall | Change


def row_and_alone(this: PoolRank, case: Case, row: Sequence[Happening]) -> list[tuple[RankOutput, RankOutput]]:
    """Each image of a row as drawn there, and as drawn by ranks that had never drawn another. One may fail."""
    with reset_engine(this) as engine:
        in_a_row = _all_of(CaseRunner(engine, case), row)
        alone = []
        for number, happening in enumerate(row):
            if isinstance(happening, ImageCall):
                changes = [before for before in row[:number] if isinstance(before, Change)]
                alone += _all_of(CaseRunner(engine, case), [*changes, happening])
        return list(zip(in_a_row, alone, strict=True))


def _all_of(runner: CaseRunner, row: Sequence[Happening]) -> list[RankOutput]:
    found = []
    for happening in row:
        if isinstance(happening, Change):
            happening.happen(runner.engine)
        elif happening.fails_after is None:
            found.append(runner.generate(happening))
        else:
            with suppress(ArithmeticError):
                assert runner.generate(happening).latents is None, "it was to fail"  # an idle rank draws nothing
    return found
