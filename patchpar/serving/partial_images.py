"""Partial images of a call on its way: its latents by a linear map that finished images have fitted, or decoded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from patchpar.pipeline.messages import Previews
from patchpar.pipeline.report import Run
from patchpar.serving.latent_preview import ColourMap, grid_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialImage:
    """A PIL image of the steps so far. `image_index`: of which image of the request; `index`: its number, from 0."""

    image_index: int
    index: int
    image: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFigures:
    """What clients are told of a call: its plan as text, seconds, ranks and steps.

    `recovered`: how often it was made again after it had lost a worker.
    """

    plan: str
    seconds: float
    ranks: int
    steps: int
    recovered: int = 0

    @classmethod
    def of(cls, run: Run, recovered: int = 0) -> "ImageFigures":
        """Return the figures of a call."""
        return cls(plan=str(run.plan), seconds=run.seconds, ranks=len(run.ranks), steps=run.steps, recovered=recovered)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "ImageFigures":
        """Return the figures of a JSON object. Raises KeyError, TypeError and ValueError."""
        return cls(
            plan=str(facts["plan"]),
            seconds=float(facts["seconds"]),
            ranks=int(facts["ranks"]),
            steps=int(facts["steps"]),
            recovered=int(facts.get("recovered", 0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedImage:
    """A finished PIL image of a request, and the figures of its call. `prompt_tokens`: of the prompt."""

    image_index: int
    image: Any
    figures: ImageFigures
    reason: str
    prompt_tokens: int


class PartialImages:
    """Receives latents of one image. `send` gets its partial images, of `size`, width and height in pixels.

    `decoded`: it receives images instead, which the pipeline has decoded.

    `after`: the last step whose latents have come, and `sent`: how many images have; a call that goes on where another
    one was begins with those of that one.
    """

    def __init__(
        self,
        colours: ColourMap,
        *,
        size: tuple[int, int],
        count: int,
        image_index: int,
        send: Callable[[Any], object],
        decoded: bool = False,
    ) -> None:
        self._colours, self._size, self._count, self._send = colours, size, count, send
        self._image_index, self._decoded = image_index, decoded
        self._latents: Any = None
        self.after = self.sent = 0

    @property
    def previews(self) -> Previews:
        """What a call of the pipeline is to send."""
        receive = self.receive_image if self._decoded else self.receive
        return Previews(count=self._count, receive=receive, decoded=self._decoded)

    def receive(self, step: int, steps: int, latents: Any) -> None:
        """Send latents of a step as a partial image; keep those of the last one for `fit`."""
        self._latents = grid_of(latents.numpy(), self._size)
        if step < steps and self._latents is not None:
            self.receive_image(step, steps, self._colours.enlarged(self._latents, self._size))

    def receive_image(self, step: int, steps: int, image: Any) -> None:
        """Send a PIL image of a step as a partial image, unless there is none, or the step has had one."""
        if step <= self.after:
            return  # in a call that is made again
        self.after = step
        if image is not None:
            self._send(PartialImage(image_index=self._image_index, index=self.sent, image=image))
            self.sent += 1

    def fit(self, image: Any) -> None:
        """Fit the map to the finished image, for later ones."""
        if self._latents is not None:
            self._colours.fit(self._latents, image)
