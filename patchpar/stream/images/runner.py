"""What one rank of a stream of pictures does: loads the whole pipeline, draws its denoising steps of each picture."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport, connect, watched
from patchpar.errors import PlanError
from patchpar.launch.executor import InteractiveRankContext
from patchpar.models.dtype import with_dtype
from patchpar.models.loading import load_pipeline
from patchpar.models.quiet_libraries import hush
from patchpar.stream.images.messages import GeneratedImage, ImageRequest
from patchpar.stream.images.stage import ImageStage
from patchpar.stream.messages import EndStream

THROUGH = "shared_memory"
"""Ranks are workers of one host, and NCCL would have a message wait for those that are expected before it."""


class ImageRunner:
    """One rank."""

    def __init__(self, context: InteractiveRankContext) -> None:
        self._context = context
        self._device = torch.device(context.device)
        self._transport: Transport | None = None
        self._pipe: Any = None
        if context.world_size > 1:  # before anything of a model arrives: unpickling it imports what talks
            hush()

    def load(self, model: str, options: Mapping[str, Any], takes_image: bool = False) -> str:
        """Load with diffusers, from safetensors only; the pipeline's class. Raises PlanError."""
        if self._context.world_size > 1 and self._transport is None:
            with self._context.waiting:
                self._transport = connect(self._context, through=THROUGH)
        pipe = load_pipeline(model, with_dtype(options))
        self._pipe = (_taking_image(pipe) if takes_image else pipe).to(self._device)
        self._pipe.set_progress_bar_config(disable=True)
        return type(self._pipe).__name__

    def run(self) -> int:
        """Draw what the session orders, until it says EndStream; how many. Raises what the pipeline raises."""
        context, door = self._context, None
        if self._transport is not None:
            door = Communicator(watched(self._transport, context), context.mark)
        stage = ImageStage(self._pipe, context.rank, context.world_size, door, context.mark)
        return stage.run(self._take, self._put)

    def _take(self, patience: float) -> ImageRequest | EndStream | None:
        heard = self._context.hear(min(patience, self._context.deadline / 4))
        self._context.mark("stream")
        return heard if isinstance(heard, ImageRequest | EndStream) else None

    def _put(self, number: int, result: Any) -> None:
        self._context.emit(GeneratedImage(number=number, picture=result.images[0]))


def _taking_image(pipe: Any) -> Any:
    """The pipeline itself, or the one of its family that starts from an image. Raises PlanError if there is none."""
    if "image" in signature(pipe.__call__).parameters:
        return pipe
    from diffusers import AutoPipelineForImage2Image  # imports every such pipeline, which takes long

    try:
        return AutoPipelineForImage2Image.from_pipe(pipe)
    except ValueError as error:
        raise PlanError(
            f"a {type(pipe).__name__} draws from text alone, and diffusers knows none of its family that starts from "
            "an image: use another model"
        ) from error
