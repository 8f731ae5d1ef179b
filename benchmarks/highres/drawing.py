"""The pictures that `benchmarks.highres` compares: one caption and one noise, every way, by the embedded model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.highres.counting import Subject, miscounted
from benchmarks.highres.measures import agreement_db, repetition_index, seam_index
from patchpar import ParallelPipeline, Plan, StructureGuidance
from patchpar.highres.geometry import starts_of

NATIVE, CELL, GUIDANCE = 256, 4, 3.5  # pixels; pixels of a latent
DEADLINE = 600.0
METHODS: dict[str, Any] = {
    "native": None,
    "direct": None,
    "windows alone": StructureGuidance(switch=1.0, kept=0.0),
    "paper": StructureGuidance(preset="paper"),
    "calibrated, not kept": StructureGuidance(kept=0.0),
    "calibrated": StructureGuidance(),
}
"""Native pictures are drawn from every s-th sample of the noise of the large ones: the anchor's own beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Figures of one picture, see `measures` and `counting`; of a native one only objects are counted."""

    miscounted: float
    repetition: float | None = None
    seam_z: float | None = None
    agreement_db: float | None = None


@contextmanager
def pipeline() -> Iterator[ParallelPipeline]:
    """The embedded model on one CPU."""
    with ParallelPipeline.from_pretrained(
        "embedded", devices="cpu:1", plan=Plan(), deadline=DEADLINE, torch_dtype=torch.float32
    ) as pipe:
        pipe.set_progress_bar_config(disable=True)
        yield pipe


def drawn(pipe: ParallelPipeline, name: str, subject: Subject, *, scale: int, steps: int, seed: int) -> Tensor:
    """A picture (3, H, W) in 0..1."""
    side = scale * NATIVE // CELL
    noise = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(seed))
    latents, pixels = (noise[..., ::scale, ::scale], NATIVE) if name == "native" else (noise, scale * NATIVE)
    pipe.plan = Plan() if METHODS[name] is None else Plan(strategy=METHODS[name])
    output = pipe(
        subject.caption,
        height=pixels,
        width=pixels,
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        latents=latents.contiguous(),
        output_type="pt",
    )
    picture: Tensor = output.images[0]
    return picture.float().clamp(0, 1)


def looked_at(picture_CHW: Tensor, native_CHW: Tensor, subject: Subject) -> Look:
    """The figures of a picture beside the native one of the same caption."""
    side = picture_CHW.shape[-1]
    if side == NATIVE:
        return Look(miscounted=miscounted(picture_CHW, subject))
    rows = [CELL * start for start in starts_of(side // CELL, NATIVE // CELL, 0.5, 1) if start]
    return Look(
        miscounted=miscounted(picture_CHW, subject),
        repetition=repetition_index(picture_CHW, (NATIVE, NATIVE)).value,
        seam_z=max(seam_index(each, rows).z for each in (picture_CHW, picture_CHW.transpose(1, 2))),
        agreement_db=agreement_db(picture_CHW, native_CHW),
    )


def sheet(rows: Sequence[Sequence[Tensor]], side: int = NATIVE) -> Tensor:
    """Pictures side by side, each at `side` pixels: (3, H, W)."""
    shrunk = [
        torch.cat([torch.nn.functional.interpolate(one[None], (side, side), mode="area")[0] for one in row], 2)
        for row in rows
    ]
    return torch.cat(shrunk, 1)
