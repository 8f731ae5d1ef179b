"""What becomes of a pipeline when it arrives in a rank: made for another task, or come from another process."""

from typing import Any

import transformers
from torch import nn

from patchpar.errors import UnsupportedModel


def for_task(pipe: Any, task: str | None) -> Any:
    """The pipeline of a model for "image-to-image", with the same networks; as it is without a task.

    Raises UnsupportedModel where diffusers has none for such a model.
    """
    if task is None:
        return pipe
    from diffusers import AutoPipelineForImage2Image  # imports every such pipeline, which takes long

    try:
        return AutoPipelineForImage2Image.from_pipe(pipe)
    except ValueError as error:
        raise UnsupportedModel(f"diffusers has no pipeline of task {task!r} for a {type(pipe).__name__}") from error


def prepare_pipeline(pipe: Any) -> None:
    """Tell transformers again what its models can record (hidden states): their constructors do so, once per process.

    Without it a text encoder that was unpickled returns no hidden states. Only transformers 5 and later keep this so.
    """
    registry = getattr(getattr(transformers.utils, "output_capturing", None), "_CAN_RECORD_REGISTRY", None)
    if registry is None:
        return
    networks = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    for module in (module for network in networks for module in network.modules()):
        if isinstance(module, transformers.PreTrainedModel):
            registry[module] = module._can_record_outputs
