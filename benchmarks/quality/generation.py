"""How `benchmarks.quality` generates its images and compares them: by one process, by ranks, side by side.

Ranks return latents, and one process decodes all of them: what differs then is what the denoiser did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor

from benchmarks.image_quality import psnr_db, ssim
from benchmarks.quality.records import Named, Setting
from patchpar import ParallelPipeline, Plan, Run
from patchpar.cli.bench.lpips import Lpips
from patchpar.models.files import inspect_folder
from patchpar.strategies import parse_strategy
from training.classifier import Classifier, judge
from training.scenes import SIDES, Scene, look_of

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "DDIM": ("DDIMScheduler", {}),
    "DPM++ 2M": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "solver_order": 2}),
    "flow": ("FlowMatchEulerDiscreteScheduler", {}),
}
DEADLINE = 600.0
"""Seconds: ranks may share a core, and one step of a batch then takes long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """One of the held-out captions, its place in the list, and what the image should show."""

    index: int
    text: str
    scene: Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One image beside the exact one. See `Record`."""

    psnr_db: float
    ssim: float
    lpips: float | None
    right: bool


def hash_of(folder: Path) -> str:
    """What a model folder holds, in 16 letters."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def arguments(setting: Setting, captions: Sequence[Caption]) -> dict[str, Any]:
    """What the pipeline is called with. Every caption has a generator of its own, so batches may be cut anywhere."""
    return {
        "prompt": [caption.text for caption in captions],
        "height": setting.height,
        "width": setting.width,
        "num_inference_steps": setting.steps,
        "guidance_scale": setting.guidance,
        "generator": [torch.Generator().manual_seed(setting.seed + caption.index) for caption in captions],
        "output_type": "latent",
    }


class OneProcess:
    """The plain pipeline in this process: makes the exact images and keeps them in a folder, decodes latents."""

    def __init__(self, folder: Path, cache: Path) -> None:
        absent = dict.fromkeys(inspect_folder(folder, "fp16").absent)
        options = {"variant": "fp16", "torch_dtype": torch.float32, "use_safetensors": True}
        self.pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **options, **absent)
        self.pipe.set_progress_bar_config(disable=True)
        self._config, self._cache = self.pipe.scheduler.config, cache

    def scheduler(self, name: str) -> Any:
        """A new scheduler with the model's noise schedule."""
        kind, options = SCHEDULERS[name]
        return getattr(diffusers, kind).from_config(self._config, **options)

    def exact(self, setting: Setting, captions: Sequence[Caption]) -> Tensor:
        """Images (B, 3, H, W) in 0..1, generated where they are not kept yet."""
        missing = [caption for caption in captions if not self._file(setting, caption).is_file()]
        if missing:
            self.pipe.scheduler = self.scheduler(setting.scheduler)
            latents = self.pipe(**arguments(setting, missing)).images
            for caption, image in zip(missing, self.decode(latents), strict=True):
                self._keep(self._file(setting, caption), image)
        return torch.stack([torch.from_numpy(np.load(self._file(setting, caption))) for caption in captions])

    @torch.no_grad()
    def decode(self, latents_BChw: Tensor) -> Tensor:
        """As the pipeline itself does, one by one: images (B, 3, H, W) in 0..1."""
        scaled = latents_BChw / self.pipe.vae.config.scaling_factor
        decoded = torch.cat([self.pipe.vae.decode(one[None]).sample for one in scaled])
        return self.pipe.image_processor.postprocess(decoded, output_type="pt").float()

    def _file(self, setting: Setting, caption: Caption) -> Path:
        facts = f"{setting!r} {caption.text!r} diffusers {diffusers.__version__} torch {torch.__version__}"
        name = hashlib.sha256(facts.encode()).hexdigest()[:24]
        return self._cache / setting.model / f"{name}.npy"

    @staticmethod
    def _keep(file: Path, image_CHW: Tensor) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part.npy")
        np.save(part, image_CHW.numpy())
        part.replace(file)


class Ranks:
    """CPU workers that share one pipeline, under one method after the other."""

    def __init__(self, folder: Path, count: int) -> None:
        self.count = count
        options = {"variant": "fp16", "torch_dtype": torch.float32}
        self._pipe = ParallelPipeline.from_pretrained(folder, devices=f"cpu:{count}", deadline=DEADLINE, **options)
        self._pipe.set_progress_bar_config(disable=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()

    @contextmanager
    def under(self, named: Named, setting: Setting, scheduler: Any, caption: Caption) -> Iterator[None]:
        """Generate by this method while open. A short call first lets ranks make their seams and check them."""
        pipe = self._pipe
        strategy = parse_strategy(named.text)
        pipe.scheduler, pipe.plan = scheduler, Plan(**{strategy.axis: self.count}, strategy=strategy)
        pipe(**arguments(setting, [caption]) | {"num_inference_steps": 2})
        pipe._executor.call("control", exchange=named.method.exchange)
        try:
            yield
        finally:
            pipe._executor.call("control", exchange="on")

    def generate(self, setting: Setting, captions: Sequence[Caption]) -> tuple[Tensor, Run]:
        """Latents (B, C, h, w), and the figures of the call."""
        latents = self._pipe(**arguments(setting, captions)).images
        run = self._pipe.last_run
        assert run is not None
        return latents, run


class Meter:
    """Compares images. Without `lpips` that figure is None."""

    def __init__(self, classifier: Classifier, lpips: Lpips | None) -> None:
        self._classifier, self.lpips = classifier, lpips

    def compare(self, images_BCHW: Tensor, exact_BCHW: Tensor, captions: Sequence[Caption]) -> list[Comparison]:
        """Figures of each image, in 0..1, beside its exact one."""
        pairs = zip(images_BCHW[:, None], exact_BCHW[:, None], captions, strict=True)
        return [self._compared(made, exact, caption) for made, exact, caption in pairs]

    def _compared(self, made_1CHW: Tensor, exact_1CHW: Tensor, caption: Caption) -> Comparison:
        seen = judge(self._classifier, made_1CHW * 2 - 1)[0]
        return Comparison(
            psnr_db=psnr_db(made_1CHW, exact_1CHW),
            ssim=ssim(made_1CHW, exact_1CHW),
            lpips=self.lpips(made_1CHW * 2 - 1, exact_1CHW * 2 - 1).item() if self.lpips else None,
            right=all(seen.on(side) == look_of(caption.scene.on(side)) for side in SIDES),
        )
