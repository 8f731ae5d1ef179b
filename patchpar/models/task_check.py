"""Is a model for what it is asked: told before any worker works, with the verb that would do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.task import PipelineTask, Product, purpose_of_model

VERBS: Mapping[str, str] = {"pictures": "generate", "video": "video"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTask:
    """What is asked of a model: `verb` of the command line, and what it makes.

    `has_image`: whether there is a picture to begin with; None where the verb sees to that itself. `per_prompt`: how
    many pictures for each prompt.
    """

    verb: str
    product: Product = "pictures"
    has_image: bool | None = False
    per_prompt: int = 1

    def check_model(self, model: str | Path, options: Mapping[str, Any]) -> None:
        """Raise PlanError if the model, loaded with `options`, cannot do it, as far as its folder tells."""
        self.check(purpose_of_model(model, options))

    def check(self, purpose: PipelineTask | None) -> None:
        """Raise PlanError if a pipeline of this purpose cannot do it. None: nothing is known, so nothing is refused."""
        if purpose is None:
            return
        if purpose.product not in ("", self.product):
            raise PlanError(f"this model is a {purpose.pipeline}, which makes {purpose.product}: {_way_of(purpose)}")
        if purpose.begins_with and self.has_image is False:
            raise PlanError(f"this model is a {purpose.pipeline}, which begins with a {self._way_to_begin(purpose)}")
        if self.has_image and purpose.parameters and "image" not in purpose.parameters:
            raise PlanError(f"this model is a {purpose.pipeline}, which takes no picture: leave out --image")
        if self.per_prompt > 1 and purpose.parameters and "num_images_per_prompt" not in purpose.parameters:
            raise PlanError(
                f"--num-images {self.per_prompt}: this model is a {purpose.pipeline}, which draws one picture for each "
                "prompt: give the prompt several times"
            )

    def _way_to_begin(self, purpose: PipelineTask) -> str:
        if purpose.begins_with == "video":
            return "video, and no verb has one to give: call it in Python, pipe(prompt, video=frames)"
        if self.verb == "video":
            return "picture: add --image FILE"
        return (
            f"picture, and `patchpar {self.verb}` has none to give: `patchpar upscale PICTURE` draws a picture again, "
            "larger; for anything else call it in Python, pipe(prompt, image=picture)"
        )


def _way_of(purpose: PipelineTask) -> str:
    verb = VERBS.get(purpose.product)
    return f"use `patchpar {verb}`" if verb else "no verb does; call it in Python, through ParallelPipeline"
