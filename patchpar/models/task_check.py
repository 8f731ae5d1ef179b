"""Whether a model fits the command: checked before any worker runs, with the right verb in the message."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.task import PipelineTask, Product, purpose_of_model

VERBS: Mapping[str, str] = {"images": "generate", "video": "video"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTask:
    """The task requested of a model: the `verb` of the command line and its kind of output.

    `has_image`: whether there is an input image; None if the verb checks that itself. `per_prompt`: images per prompt.
    """

    verb: str
    product: Product = "images"
    has_image: bool | None = False
    per_prompt: int = 1

    def check_model(self, model: str | Path, options: Mapping[str, Any]) -> None:
        """Raise PlanError if the model, loaded with `options`, cannot do this, as far as its folder shows."""
        self.check(purpose_of_model(model, options))

    def check(self, purpose: PipelineTask | None) -> None:
        """Raise PlanError if a pipeline of task `purpose` cannot do this. None, an unknown task, is accepted."""
        if purpose is None:
            return
        if purpose.product not in ("", self.product):
            raise PlanError(f"this model is a {purpose.pipeline}, which makes {purpose.product}: {_way_of(purpose)}")
        if purpose.begins_with and self.has_image is False:
            raise PlanError(f"this model is a {purpose.pipeline}, which begins with {self._way_to_begin(purpose)}")
        if self.has_image and purpose.parameters and "image" not in purpose.parameters:
            raise PlanError(f"this model is a {purpose.pipeline}, which takes no image: leave out --image")
        if self.per_prompt > 1 and purpose.parameters and "num_images_per_prompt" not in purpose.parameters:
            raise PlanError(
                f"--num-images {self.per_prompt}: this model is a {purpose.pipeline}, which generates one image per "
                "prompt: give the prompt several times"
            )

    def _way_to_begin(self, purpose: PipelineTask) -> str:
        if purpose.begins_with == "video":
            return "a video, which no verb takes: call it in Python, pipe(prompt, video=frames)"
        if self.verb == "video":
            return "an image: add --image FILE"
        return (
            f"an image, which `patchpar {self.verb}` does not take: `patchpar upscale IMAGE` generates an image again, "
            "larger; for anything else call it in Python, pipe(prompt, image=image)"
        )


def _way_of(purpose: PipelineTask) -> str:
    verb = VERBS.get(purpose.product)
    return f"use `patchpar {verb}`" if verb else "no verb does; call it in Python, through ParallelPipeline"
