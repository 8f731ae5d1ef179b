"""Whole pipelines in bands against the same pipelines alone: final latents, on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from patchpar.models.files import embedded_model
from patchpar.pipeline.messages import CallOptions, RandomState
from patchpar.plan.plan import Plan
from tests import tiny
from tests.ranks import PoolRank
from tests.tensors import psnr_db, relative
from tests.tiny import sample_images

SCHEDULERS = {
    "DDIM": diffusers.DDIMScheduler,
    "Euler ancestral": diffusers.EulerAncestralDiscreteScheduler,
    "DPM++ 2M": diffusers.DPMSolverMultistepScheduler,
    "Euler": diffusers.EulerDiscreteScheduler,
}
UNGUIDED = {"svd": {"min_guidance_scale": 1.0, "max_guidance_scale": 1.0}, "flux": {"true_cfg_scale": 1.0}}
SEED = 7
CAPTION = "a red house on the left and a tree on the right, green hills at noon"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a pipeline. `size` in pixels; `control`: also run it with every band alone.

    `scheduler`: one of SCHEDULERS, or "own" for that of the pipeline.
    """

    plan: str
    scheduler: str
    guided: bool = True
    size: tuple[int, int] = (128, 128)
    steps: int = 3
    control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """How far the final latents are from those of one process."""

    relative_error: float
    psnr_db: float
    control_error: float | None


def compared(this: PoolRank, name: str, cases: Sequence[Case], verifications: str) -> list[Compared | None]:
    """Each case on as many of the ranks as its plan takes. Rank 0 knows; it also runs the plain pipeline."""
    pipe, arguments = _pipeline(name)
    engine = this.runner()
    engine.adopt(pipe)
    original = pipe.scheduler
    found = []
    for case in cases:
        plan, random = Plan.parse(case.plan), RandomState(seed=SEED)
        options = CallOptions(plan=plan, verify=Path(verifications), random=random, quiet=True)
        kwargs = arguments | _changes(name, case)
        engine.restore()
        pipe.scheduler = SCHEDULERS[case.scheduler].from_config(original.config)
        torch.manual_seed(SEED)  # some pipelines do not hand their generator to the scheduler
        plain = _latents(pipe(**_seeded(kwargs))) if this.rank == 0 else None
        generated = [engine.generate(_seeded(kwargs), options)]
        if case.control:
            engine.control(exchange="off")
            generated.append(engine.generate(_seeded(kwargs), options))
        if plain is not None:
            error, *control = [relative(_latents(each.output), plain) for each in generated]
            psnr = psnr_db(_latents(generated[0].output), plain)
            found.append(Compared(relative_error=error, psnr_db=psnr, control_error=next(iter(control), None)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Halved:
    """Relative differences of final latents in half precision. `truth`: the same half weights computed in fp32.

    `ours`: a plan beside one process; `batched`, `math`: plain diffusers in a batch of two, or with attention's plain
    kernel, beside plain diffusers. `ours_off` and `plain_off`: how far each is from the truth. `alone`: `ours` with
    every band by itself.
    """

    ours: float
    batched: float
    math: float
    ours_off: float
    plain_off: float
    alone: float | None = None


def halved(
    this: PoolRank, name: str, dtype: torch.dtype, cases: Sequence[Case], verifications: str
) -> list[Halved | None]:
    """Each case in half precision, on as many of the ranks as its plan takes. Rank 0 knows."""
    pipe, arguments = _pipeline(name)
    pipe.to(dtype)
    engine, original, found = this.runner(), pipe.scheduler, []
    for case in cases:
        kwargs = arguments | _changes(name, case) | {"latents": _noise(pipe, case.size, dtype)}
        pipe.scheduler = SCHEDULERS.get(case.scheduler, type(original)).from_config(original.config)
        plain = _plain_ways(pipe, kwargs, dtype) if this.rank == 0 else None
        engine.adopt(pipe)
        options = CallOptions(
            plan=Plan.parse(case.plan), verify=Path(verifications), random=RandomState(seed=SEED), quiet=True
        )
        generated = engine.generate(_seeded(kwargs), options)
        control = None
        if case.control:
            engine.control(exchange="off")
            control = engine.generate(_seeded(kwargs), options)
        engine.restore()
        if plain is not None:
            one, ours = plain["one"], _latents(generated.output)
            found.append(
                Halved(
                    ours=relative(ours, one),
                    batched=relative(plain["batched"], one),
                    math=relative(plain["math"], one),
                    ours_off=relative(ours, plain["truth"]),
                    plain_off=relative(one, plain["truth"]),
                    alone=relative(_latents(control.output), one) if control else None,
                )
            )
    return found


def _noise(pipe: Any, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The same in every format: torch draws other numbers in half precision than in fp32."""
    height, width = (side // pipe.vae_scale_factor for side in size)
    shape = (1, pipe.vae.config.latent_channels, height, width)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    pack: Any = getattr(pipe, "_pack_latents", None)  # of FLUX
    return pack(noise, *shape) if pack else noise


def _plain_ways(pipe: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Final latents of plain diffusers: in one process, in a batch of two, with another kernel, and in fp32."""
    one = _latents(pipe(**_seeded(kwargs)))
    twice = {"prompt": [kwargs["prompt"]] * 2, "generator": [torch.Generator().manual_seed(SEED) for _ in range(2)]}
    several: dict[str, Any] = {name: [kwargs[name]] * 2 for name in ("image", "negative_prompt") if name in kwargs}
    several["latents"] = torch.cat([kwargs["latents"]] * 2)
    batched = _latents(pipe(**kwargs | twice | several))[:1]
    with sdpa_kernel(SDPBackend.MATH):
        slow = _latents(pipe(**_seeded(kwargs)))
    pipe.to(torch.float32)
    truth = _latents(pipe(**_seeded(kwargs | {"latents": kwargs["latents"].float()})))
    pipe.to(dtype)
    return {"one": one, "batched": batched, "math": slow, "truth": truth}


def _pipeline(name: str) -> tuple[Any, dict[str, Any]]:
    if name != "embedded":
        built = tiny.build(name)
        return built.pipe, built.call_kwargs
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        embedded_model(), variant="fp16", torch_dtype=torch.float32, use_safetensors=True
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe, {"prompt": CAPTION}


def _changes(name: str, case: Case) -> dict[str, Any]:
    height, width = case.size
    changes: dict[str, Any] = {"num_inference_steps": case.steps, "output_type": "latent"}
    if not case.guided:
        changes |= UNGUIDED.get(name, {"guidance_scale": 1.0})
    if "img2img" not in name:
        changes |= {"height": height, "width": width}
    if name == "svd" or any(part in name for part in ("img2img", "inpaint", "controlnet")):
        changes["image"] = sample_images.scene().resize((width, height))
    if "inpaint" in name:
        changes["mask_image"] = sample_images.mask().resize((width, height))
    return changes


def _seeded(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs | {"generator": torch.Generator().manual_seed(SEED)}


def _latents(output: Any) -> Tensor:
    return output.images if hasattr(output, "images") else output.frames
