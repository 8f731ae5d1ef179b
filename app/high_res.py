"""Images above the model's native size: generated from a prompt, or upscaled from an upload."""

from dataclasses import dataclass
from typing import Any

from patchpar import PlanError

from .image_runner import ImageJobRunner, JobImage, RunOptions
from .job_queue import Job
from .presets import Preset, large_image, plain
from .requests import MAX_PIXELS, GenerateRequest

MAX_SCALE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpscaleResult:
    """The result; if requested a PIL image to compare it with, and the label of the pair."""

    generated: JobImage
    baseline: Any = None
    pair: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpscaleRequest:
    """An uploaded PIL image, to be upscaled by `scale`. `strength`: as of diffusers' image-to-image pipelines.

    Raises PlanError.
    """

    image: Any
    generate: GenerateRequest
    scale: float = 2.0
    strength: float = 0.35

    def __post_init__(self) -> None:
        if not 1 < self.scale <= MAX_SCALE:
            raise PlanError(f"scale {self.scale:g}: it is more than 1 and at most {MAX_SCALE:g}")
        if not 0.05 <= self.strength < 1:
            raise PlanError(f"strength {self.strength:g}: it is a number from 0.05 to 0.95")
        width, height = self.size
        if width * height > MAX_PIXELS:
            limit = (MAX_PIXELS / (self.image.width * self.image.height)) ** 0.5
            remedy = f"use a scale of at most {int(limit * 100) / 100:g}" if limit > 1.01 else "use a smaller image"
            raise PlanError(f"it would have {width} x {height} pixels, at most {MAX_PIXELS} in all: {remedy}")
        self.generate.check_strength(self.strength)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the result in pixels."""
        return round(self.image.width * self.scale), round(self.image.height * self.scale)


def high_res_preset(count: int, options: str) -> Preset:
    """Structure guidance on all devices, with options as on the command line. Raises PlanError."""
    preset = large_image(count, options.strip())
    preset.plan(count)
    return preset


def direct_preset(count: int) -> Preset:
    """Plain generation at this size, without structure guidance."""
    return plain() if count == 1 else Preset(label="Plain", degrees=f"patch={count}")


def generate_high_res(
    runner: ImageJobRunner, job: Job, request: GenerateRequest, preset: Preset, *, baseline: bool
) -> UpscaleResult:
    """Generate the image; `baseline`: also without structure guidance."""
    guided = runner.generate(job, request, preset, RunOptions(title="structure guidance"))
    if not baseline:
        return UpscaleResult(generated=guided)
    options = RunOptions(title="without guidance, to compare", traced=False)
    direct = runner.generate(job, request, direct_preset(runner.workers.count), options)
    return UpscaleResult(generated=guided, baseline=direct.image, pair="Without and with structure guidance")


def upscale_image(runner: ImageJobRunner, job: Job, request: UpscaleRequest) -> UpscaleResult:
    """Upscale an uploaded image."""
    generated = runner.upscale(job, request.generate, request.image, scale=request.scale, strength=request.strength)
    resized = request.image.resize(request.size, resample=3)
    return UpscaleResult(generated=generated, baseline=resized, pair="Resized, and upscaled")
