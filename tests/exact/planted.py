"""Pipelines with code of other libraries in their denoiser, under any plan: what ranks of these tests run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PatchparError
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.cfg.split import guidance_of
from patchpar.strategies.data.split import PromptSlice, as_one_call
from tests import tiny
from tests.exact.later import FIRST_WITH_EFFECT, after
from tests.exact.merged import merge_tokens
from tests.ranks import PoolRank
from tests.tensors import relative

STEPS = 4
PROMPTS = ["a red house", "a blue boat", "three tall pines"]
Plant = Callable[[Any], object]


def _changed(change: Callable[[Tensor], Tensor]) -> Plant:
    return lambda unet: after(unet.mid_block.resnets[0], change)


def _mean_of_images(x: Tensor) -> Tensor:
    """Without what all images of a batch have in common."""
    return x - 0.5 * x.mean(0, keepdim=True)


def _centred(x: Tensor) -> Tensor:
    """Without its mean over rows and columns."""
    return x - x.mean((-2, -1), keepdim=True)


def _later(unet: Any) -> None:
    """The batch is mixed from some step on, by a counter of calls."""
    count = [0]

    def change(x: Tensor) -> Tensor:
        count[0] += 1
        return _mean_of_images(x) if count[0] > FIRST_WITH_EFFECT else x

    after(unet.mid_block.resnets[0], change)


def _counted(unet: Any) -> None:
    """Another factor in each step: the same for all images."""
    count = [0]

    def change(x: Tensor) -> Tensor:
        count[0] += 1
        return x * (1 + 0.1 * count[0])

    after(unet.mid_block.resnets[0], change)


def _reused(unet: Any) -> None:
    """The output of the step before in every second step, as caches of features do."""
    kept: dict[str, Any] = {"step": 0}
    own = unet.mid_block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept["step"] += 1
        if kept["step"] % 2:
            kept["output"] = own(*args, **kwargs)
        return kept["output"]

    unet.mid_block.forward = forward


def _by_parity(x: Tensor) -> Tensor:
    """As token merging does, which tells batches with two branches by their size."""
    return 0.5 * x if len(x) % 2 else x


def _noisy(x: Tensor) -> Tensor:
    """Noise from torch's own generator, image after image."""
    return x + 0.1 * torch.randn(x.shape)


PLANTS: dict[str, Plant] = {
    "batch": _changed(_mean_of_images),
    "batch, later": _later,
    "image": _changed(_centred),
    "counted": _counted,
    "reused": _reused,
    "parity": _changed(_by_parity),
    "noise": _changed(_noisy),
    "merged": merge_tokens,
    "": lambda unet: None,
}


@contextmanager
def _ticking(pipe: Any, clock: StepClock) -> Iterator[None]:
    """While open, the clock counts the scheduler's steps."""
    own, before = pipe.scheduler.step, vars(pipe.scheduler).get("step")

    def step(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        clock.tick()
        return result

    pipe.scheduler.step = step
    try:
        yield
    finally:
        if before is None:
            del pipe.scheduler.step
        else:
            pipe.scheduler.step = before


def _arguments(found: tiny.Tiny, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(5)
    more = {"num_inference_steps": STEPS, "output_type": "latent", "generator": torch.Generator().manual_seed(0)}
    return found.call_kwargs | more | options


def _plain(plant: str, options: dict[str, Any]) -> Tensor:
    """Final latents of one process of diffusers."""
    found = tiny.build("sd")
    PLANTS[plant](found.pipe.unet)
    latents: Tensor = found.pipe(**_arguments(found, options)).images
    return latents


def _planned(
    this: PoolRank,
    plan: str,
    plant: str,
    options: dict[str, Any],
    verifications: VerificationCache | None,
    when: str = "before",
    world: int = 0,
) -> Tensor:
    """Final latents under a plan, of this rank's prompts. `world`: of how many ranks, if not of all."""
    found, wanted, clock = tiny.build("sd"), Plan.parse(plan), StepClock()
    rank, world = (this.rank, this.world) if not world else (0, world)
    mesh, installed = Mesh(rank, range(world), **wanted.degrees()), InstalledPlan(found.pipe)
    if when == "before":
        PLANTS[plant](found.pipe.unet)
    kwargs = _arguments(found, options)
    installed.install_denoisers(
        wanted, mesh, this.comm(), clock, lambda: guidance_of(found.pipe, kwargs), verifications
    )
    with ExitStack() as stack:
        stack.callback(installed.restore)
        for part in ("", plant) if when == "after" else (plant,):
            if when == "after":
                PLANTS[part](found.pipe.unet)
            kwargs = _arguments(found, options)
            clock.reset()
            installed.begin(tracing=False, call=kwargs)
            data = mesh["data"]
            with as_one_call(found.pipe, kwargs, data.rank, data.size) as own, _ticking(found.pipe, clock):
                latents: Tensor = found.pipe(**own).images
            installed.finish()
    return latents


@torch.no_grad()
def found(
    this: PoolRank,
    plan: str,
    plant: str,
    folder: str,
    options: dict[str, Any],
    when: str = "before",
    trusted: Sequence[str] | None = (),
) -> dict[str, Any]:
    """Error against one process, and how much the plant changes; or what was said. `trusted`: None for all of it.

    With structure guidance the one process has the same plan for one rank.
    """
    verifications = None
    if trusted is not None:
        verifications = VerificationCache(Path(folder) / str(this.rank), trusted=frozenset(trusted))
    data = this.mesh(**Plan.parse(plan).degrees())["data"]
    part = PromptSlice.of(options, data.rank, data.size)
    try:
        got = _planned(this, plan, plant, options, verifications, when)
    except PatchparError as error:
        return {"message": f"{type(error).__name__}: {error}"}
    if "structure" in plan:
        alone = plan.replace(f"patch={this.world}", "patch=1")
        want, without = (_planned(this, alone, each, options, None, world=1) for each in (plant, ""))
    else:
        want, without = (_plain(each, options) for each in (plant, ""))
    rows = part.rows(len(want))
    return {"error": relative(got, want[rows]), "effect": relative(want, without)}
