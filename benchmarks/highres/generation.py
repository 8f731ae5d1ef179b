"""The images that `benchmarks.highres` compares: one caption and one noise, every way, by the embedded model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.highres.counting import Subject, miscounted
from benchmarks.highres.measures import agreement_db, repetition_index, seam_index
from patchpar import ParallelPipeline, Plan, StructureGuidance

NATIVE, CELL, GUIDANCE = 256, 4, 3.5  # pixels; pixels of a latent
STRIDE = 4  # latents: what the sides of windows are multiples of
DEADLINE = 600.0
METHODS: dict[str, Any] = {
    "native": None,
    "direct": None,
    "windows alone": StructureGuidance(switch=1.0, structure_strength=0.0),
    "paper": StructureGuidance(preset="paper"),
    "calibrated, not kept": StructureGuidance(structure_strength=0.0),
    "calibrated": StructureGuidance(),
    "touching": StructureGuidance(margin=0.0),
    "touching, context": StructureGuidance(margin=0.0, context=0.25),
    "grown": StructureGuidance(margin=0.125),
    "grown, context": StructureGuidance(margin=0.125, context=0.25),
    "flow": StructureGuidance(guide="flow"),
    "grown, flow": StructureGuidance(margin=0.125, guide="flow"),
}
"""Native images are generated from every s-th sample of the noise of the large ones: the anchor's own beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Figures of one image, see `measures` and `counting`; of a native one only objects are counted."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCache:
    """How images are generated, and a `folder` that those generated before are taken from, as a PNG shows them."""

    scale: int
    steps: int
    folder: Path | None = None

    def generated(self, pipe: ParallelPipeline, name: str, subject: Subject, *, seed: int) -> Tensor:
        """An image (3, H, W) in 0..1, generated now or before."""
        if self.folder is None:
            return generated(pipe, name, subject, scale=self.scale, steps=self.steps, seed=seed)
        path = self.folder / f"{name.replace(', ', '-').replace(' ', '-')}-x{self.scale}-{self.steps}-{seed}.png"
        if not path.exists():
            image = generated(pipe, name, subject, scale=self.scale, steps=self.steps, seed=seed)
            self.folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy()).save(path)
        displayed = np.asarray(Image.open(path).convert("RGB"))
        return torch.from_numpy(displayed.copy()).permute(2, 0, 1).float() / 255


def generated(pipe: ParallelPipeline, name: str, subject: Subject, *, scale: int, steps: int, seed: int) -> Tensor:
    """An image (3, H, W) in 0..1."""
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
    image: Tensor = output.images[0]
    return image.float().clamp(0, 1)


def borders(name: str, side: int) -> list[int]:
    """Rows in pixels at which windows of a method begin or end within an image; of others those of half overlap."""
    tiling = (METHODS[name] or StructureGuidance()).method.tiling
    cells = side // CELL
    windows = replace(tiling, moved=False).lay((cells, cells), (NATIVE // CELL,) * 2, key="", step=STRIDE)
    starts = {top for top, _ in windows.corners}
    return sorted(CELL * row for row in starts | {start + windows.window[0] for start in starts} if 0 < row < cells)


def evaluated(name: str, image_CHW: Tensor, native_CHW: Tensor, subject: Subject) -> Look:
    """The figures of a method's image beside the native one of the same caption."""
    side = image_CHW.shape[-1]
    if side == NATIVE:
        return Look(miscounted=miscounted(image_CHW, subject))
    rows = borders(name, side)
    return Look(
        miscounted=miscounted(image_CHW, subject),
        repetition=repetition_index(image_CHW, (NATIVE, NATIVE)).value,
        seam_z=max(seam_index(each, rows).z for each in (image_CHW, image_CHW.transpose(1, 2))),
        agreement_db=agreement_db(image_CHW, native_CHW),
    )


def sheet(rows: Sequence[Sequence[Tensor]], side: int = NATIVE) -> Tensor:
    """Images side by side, each at `side` pixels: (3, H, W)."""
    shrunk = [
        torch.cat([torch.nn.functional.interpolate(one[None], (side, side), mode="area")[0] for one in row], 2)
        for row in rows
    ]
    return torch.cat(shrunk, 1)
