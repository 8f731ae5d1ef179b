"""Which models can be served: those that make images or videos, from text or an image."""

from collections.abc import Mapping
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.files import resolve_model
from patchpar.models.task import PipelineTask, Product, RequestedTask, purpose_of


def check_servable(model: str, options: Mapping[str, Any]) -> None:
    """Raise PlanError if the model, loaded with `options`, is none or, as its folder shows, cannot be served."""
    folder = resolve_model(model, options)[2]
    check_task(None if folder is None else purpose_of(folder.pipeline))


def check_task(task: PipelineTask | None) -> None:
    """Raise PlanError for one that begins with a video, needs what no request has, or makes anything else."""
    if task is None:
        return
    if task.begins_with == "video":
        raise PlanError(
            f"this model is a {task.pipeline}, which begins with a video: call it in Python, pipe(prompt, video=frames)"
        )
    product: Product = "video" if task.product == "video" else "images"
    RequestedTask(verb="serve", product=product, has_image=None).check(task)
