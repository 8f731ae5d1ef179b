"""What calls of the pipeline make."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patchpar.errors import PlanError
from patchpar.pipeline.report import Run
from patchpar.serving.partial_images import CompletedImage, ImageFigures
from patchpar.serving.refusals import check_one_result


@dataclass(frozen=True, slots=True)
class GeneratedImages:
    """The finished images of a request, in order.

    `runs`: statistics of the calls of this process, which are not all where a request began in another one.
    """

    completed: tuple[CompletedImage, ...]
    runs: tuple[Run, ...]

    @property
    def images(self) -> tuple[Any, ...]:
        """The PIL images."""
        return tuple(each.image for each in self.completed)

    @property
    def figures(self) -> tuple[ImageFigures, ...]:
        """Of the call of each image."""
        return tuple(each.figures for each in self.completed)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedVideo:
    """Frames [F, H, W, 3] in uint8, statistics and figures of their call, and the reason for the plan."""

    frames: Any
    run: Run
    reason: str
    figures: ImageFigures


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A call of the pipeline that has ended well: its output, statistics, and the reason for the plan.

    `retries`: how often it was made again after it had lost a worker.
    """

    output: Any
    run: Run
    reason: str
    retries: int = 0

    @property
    def figures(self) -> ImageFigures:
        """What clients are told of it."""
        return ImageFigures.of(self.run, self.retries)


def image_of(output: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the image of a call with `arguments`.

    Raises PlanError for an output without images, and RequestError where there is one of each that was sent.
    """
    images = getattr(output, "images", None)
    if not images:
        raise PlanError(f"this model returns {type(output).__name__}, which has no images")
    check_one_result(arguments, len(images))
    return images[0]
