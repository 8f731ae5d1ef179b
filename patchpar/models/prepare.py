"""Preparation of a pipeline in a rank: for another task, or after it was sent from another process."""

from typing import Any

import transformers
from torch import nn

from patchpar.errors import UnsupportedModel


def for_task(pipe: Any, task: str | None) -> Any:
    """Return the pipeline for "image-to-image" with the same networks; unchanged without a task.

    Raises UnsupportedModel if diffusers has none for the model.
    """
    if task is None:
        return pipe
    from diffusers import AutoPipelineForImage2Image  # slow: imports every such pipeline

    try:
        return AutoPipelineForImage2Image.from_pipe(pipe)
    except ValueError as error:
        raise UnsupportedModel(
            f"diffusers has no pipeline of task {task!r} for a {type(pipe).__name__}: use another model"
        ) from error


def prepare_pipeline(pipe: Any) -> None:
    """Register what transformers models can record (hidden states), as their constructors do once per process.

    Without it an unpickled text encoder returns no hidden states. Needed for transformers 5 and later.
    """
    registry = getattr(getattr(transformers.utils, "output_capturing", None), "_CAN_RECORD_REGISTRY", None)
    if registry is None:
        return
    networks = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    for module in (module for network in networks for module in network.modules()):
        if isinstance(module, transformers.PreTrainedModel):
            registry[module] = module._can_record_outputs
