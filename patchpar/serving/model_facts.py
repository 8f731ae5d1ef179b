"""What clients are told of the served model: what it can be asked for, and the sizes of its results."""

from typing import Any

from patchpar.models.info import PipelineInfo
from patchpar.models.task import PipelineTask
from patchpar.serving.settings import RequestLimits


def model_facts(
    model: PipelineInfo, task: PipelineTask | None, limits: RequestLimits, *, decodes: bool
) -> dict[str, Any]:
    """Return fields of an entry of /v1/models. `size`: without one in the request; null if the model has none.

    `decodes`: whether partial images can be made by its decoder.
    """
    height, width = model.default_size or (0, 0)
    return {
        "tasks": _tasks(model, task),
        "previews": _previews(task, decodes=decodes),
        "size": f"{width}x{height}" if width else None,
        "size_unit": model.size_unit,
        "max_pixels": limits.pixels,
    }


def _previews(task: PipelineTask | None, *, decodes: bool) -> list[str]:
    """Return the ways in which partial images can be made."""
    if task is not None and task.product == "video":
        return []
    return ["linear", "vae"] if decodes else ["linear"]


def _tasks(model: PipelineInfo, task: PipelineTask | None) -> list[str]:
    """Return "videos", or which of "generations" and "edits" of images there are."""
    if task is not None and task.product == "video":
        return ["videos"]
    if task is not None and task.begins_with == "image":
        return ["edits"]
    return ["generations", "edits"] if "image" in model.parameters else ["generations"]
