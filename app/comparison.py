"""Compares two presets on the same image: difference of the results, statistics of both runs."""

from dataclasses import dataclass, replace
from typing import Any

from patchpar import Run
from patchpar.pipeline.image_metrics import difference_map, max_abs_diff, psnr, ssim
from patchpar.plan.byte_sizes import readable_bytes

from .image_runner import ImageJobRunner, JobImage, RunOptions
from .job_queue import Job
from .presets import Preset
from .requests import GenerateRequest

WARM_UP_STEPS = 2  # the first steps with a preset allocate and verify, and are not timed


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedImages:
    """Two images and their difference, a PIL image with its brightness multiplied by `gain`."""

    one: JobImage
    other: JobImage
    difference: Any
    gain: float
    psnr_db: float
    ssim: float
    largest: float

    @classmethod
    def of(cls, one: JobImage, other: JobImage) -> "ComparedImages":
        """Compare two images on their exact values."""
        found = difference_map(one.values, other.values)
        return cls(
            one=one,
            other=other,
            difference=found.image,
            gain=found.gain,
            psnr_db=psnr(one.values, other.values),
            ssim=ssim(one.values, other.values),
            largest=max_abs_diff(one.values, other.values),
        )

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        close = f"PSNR {self.psnr_db:.1f} dB, SSIM {self.ssim:.4f}"
        if self.largest == 0:
            return "The images are bit-equal."
        if self.largest < 0.5 / 255:
            return f"{close}; no pixel differs by half a step of 8 bits, which is invisible."
        return f"{close}; no pixel differs by more than {self.largest:.2%}."

    def rows(self, names: tuple[str, str]) -> list[tuple[str, ...]]:
        """A table of both runs."""
        return [_row(name, image.run) for name, image in zip(names, (self.one, self.other), strict=True)]


HEAD = ("", "plan", "seconds", "sent per step, all ranks", "longest wait on any rank", "exact steps")


def _row(name: str, run: Run) -> tuple[str, ...]:
    waited = max((sum(rank.seconds_waited.values()) for rank in run.ranks), default=0.0)
    exact = "all" if run.exact_steps is None else f"{run.exact_steps} of {run.steps}"
    return (
        name,
        str(run.plan),
        f"{run.seconds:.2f}",
        readable_bytes(sum(run.bytes_per_step)),
        f"{waited:.2f} s",
        exact,
    )


def compare(
    runner: ImageJobRunner, job: Job, request: GenerateRequest, presets: tuple[Preset, Preset]
) -> ComparedImages:
    """Generate with both presets, one after the other on the same devices. Raises what `generate` raises."""
    first, second = (_generated(runner, job, request, preset, number) for number, preset in enumerate(presets, 1))
    job.show(note="measuring the difference")
    return ComparedImages.of(first, second)


def _generated(runner: ImageJobRunner, job: Job, request: GenerateRequest, preset: Preset, number: int) -> JobImage:
    few = replace(request, steps=min(request.steps, WARM_UP_STEPS))
    runner.generate(job, few, preset, RunOptions(title=f"image {number} of 2, warming up", traced=False))
    return runner.generate(
        job, request, preset, RunOptions(title=f"image {number} of 2: {preset.label}", traced=False, exact=True)
    )
