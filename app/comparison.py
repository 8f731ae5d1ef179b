"""Two ways to draw the same picture, and how far the results are apart."""

from dataclasses import dataclass, replace
from typing import Any

from patchpar import Run
from patchpar.pipeline.image_metrics import difference_map, max_abs_diff, psnr, ssim
from patchpar.pipeline.report import readable_bytes

from .drawing import ImageJobRunner, JobImage, RunOptions
from .jobs import Job
from .orders import GenerateRequest
from .ways import Preset

WARM_UP_STEPS = 2  # the first steps in a new way allocate and verify; they are not what is compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two pictures and their difference, a PIL picture that is `gain` times as bright as it is."""

    one: JobImage
    other: JobImage
    difference: Any
    gain: float
    psnr_db: float
    ssim: float
    largest: float

    @classmethod
    def of(cls, one: JobImage, other: JobImage) -> "Comparison":
        """Measure two pictures, on their exact values."""
        found = difference_map(one.values, other.values)
        return cls(
            one=one,
            other=other,
            difference=found.picture,
            gain=found.gain,
            psnr_db=psnr(one.values, other.values),
            ssim=ssim(one.values, other.values),
            largest=max_abs_diff(one.values, other.values),
        )

    @property
    def verdict(self) -> str:
        """One sentence."""
        close = f"PSNR {self.psnr_db:.1f} dB, SSIM {self.ssim:.4f}"
        if self.largest == 0:
            return "The pictures are equal, to the last bit."
        if self.largest < 0.5 / 255:
            return f"{close}; no pixel differs by half a step of 8 bits, so nobody could see it."
        return f"{close}; no pixel differs by more than {self.largest:.2%}."

    def rows(self, names: tuple[str, str]) -> list[tuple[str, ...]]:
        """A table of both runs."""
        return [_row(name, picture.run) for name, picture in zip(names, (self.one, self.other), strict=True)]


HEAD = ("", "plan", "seconds", "sent a step, all ranks", "waited, at most", "exact steps")


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


def compare(artist: ImageJobRunner, job: Job, order: GenerateRequest, ways: tuple[Preset, Preset]) -> Comparison:
    """Draw in both ways, one after the other on the same devices. Raises what drawing raises."""
    first, second = (_drawn(artist, job, order, way, number) for number, way in enumerate(ways, 1))
    job.show(note="measuring the difference")
    return Comparison.of(first, second)


def _drawn(artist: ImageJobRunner, job: Job, order: GenerateRequest, way: Preset, number: int) -> JobImage:
    few = replace(order, steps=min(order.steps, WARM_UP_STEPS))
    artist.draw(job, few, way, RunOptions(title=f"picture {number} of 2, warming up", traced=False))
    return artist.draw(
        job, order, way, RunOptions(title=f"picture {number} of 2: {way.label}", traced=False, exact=True)
    )
