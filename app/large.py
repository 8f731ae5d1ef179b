"""Pictures larger than the model was trained for: drawn out of a prompt, or an uploaded one drawn again, larger."""

from dataclasses import dataclass
from typing import Any

from patchpar import PlanError

from .drawing import ImageJobRunner, JobImage, RunOptions
from .jobs import Job
from .orders import MOST_PIXELS, GenerateRequest
from .ways import Preset, plain

LARGEST_SCALE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpscaleResult:
    """What was drawn; and, where there is one, a PIL picture to hold it against, and what the pair is called."""

    drawn: JobImage
    beside: Any = None
    pair: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpscaleRequest:
    """An uploaded PIL picture, to be drawn again `scale` times as large. `strength`: how much is new.

    Raises PlanError.
    """

    picture: Any
    order: GenerateRequest
    scale: float = 2.0
    strength: float = 0.35

    def __post_init__(self) -> None:
        if not 1 < self.scale <= LARGEST_SCALE:
            raise PlanError(f"scale {self.scale:g}: it is more than 1 and at most {LARGEST_SCALE:g}")
        if not 0.05 <= self.strength < 1:
            raise PlanError(f"strength {self.strength:g}: it is a number from 0.05 to 0.95")
        width, height = self.size
        if width * height > MOST_PIXELS:
            most = (MOST_PIXELS / (self.picture.width * self.picture.height)) ** 0.5
            way_out = f"use a scale of at most {int(most * 100) / 100:g}" if most > 1.01 else "use a smaller picture"
            raise PlanError(f"it would have {width} x {height} pixels, at most {MOST_PIXELS} in all: {way_out}")
        if int(self.order.steps * self.strength) < 1:
            raise PlanError(
                f"{self.order.steps} steps, of which strength {self.strength:g} leaves none: use more of either"
            )

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels of what will be drawn."""
        return round(self.picture.width * self.scale), round(self.picture.height * self.scale)


def large_way(count: int, options: str) -> Preset:
    """Structure guidance on all devices, with options as on the command line. Raises PlanError."""
    strategy = f"asg:{options.strip()}" if options.strip() else "asg"
    way = Preset(label="Structure guidance", degrees=f"patch={count}", strategy=strategy)
    way.plan(count)
    return way


def direct_way(count: int) -> Preset:
    """The picture as the plain pipeline draws it at this size."""
    return plain() if count == 1 else Preset(label="Directly", degrees=f"patch={count}")


def draw_large(artist: ImageJobRunner, job: Job, order: GenerateRequest, way: Preset, *, beside: bool) -> UpscaleResult:
    """Draw it; `beside`: also directly."""
    guided = artist.draw(job, order, way, RunOptions(title="structure guidance"))
    if not beside:
        return UpscaleResult(drawn=guided)
    manner = RunOptions(title="directly, to compare", traced=False)
    direct = artist.draw(job, order, direct_way(artist.workers.count), manner)
    return UpscaleResult(drawn=guided, beside=direct.image, pair="Directly, and with structure guidance")


def draw_again(artist: ImageJobRunner, job: Job, wanted: UpscaleRequest) -> UpscaleResult:
    """Draw an uploaded picture again, larger."""
    drawn = artist.enlarge(job, wanted.order, wanted.picture, scale=wanted.scale, strength=wanted.strength)
    resized = wanted.picture.resize(wanted.size, resample=3)
    return UpscaleResult(drawn=drawn, beside=resized, pair="Resized, and drawn again")
