"""Runner of an image stream on one rank: loads the whole pipeline, and computes its steps of each image."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from patchpar.comm.collectives import Communicator
from patchpar.models.loading import for_task, load_pipeline, with_dtype
from patchpar.stream.images.stage import ImageStage
from patchpar.stream.messages import EndStream, GeneratedImage, ImageRequest
from patchpar.stream.rank_runner import RankRunner


class ImageRunner(RankRunner):
    """One rank of an image stream."""

    def load(self, model: str, options: Mapping[str, Any], takes_image: bool = False) -> str:
        """Load with diffusers, from safetensors only; returns the name of the pipeline's class. Raises PlanError."""
        self._connect()
        pipe = load_pipeline(model, with_dtype(options))
        is_of_text = takes_image and "image" not in signature(pipe.__call__).parameters
        self._pipe = for_task(pipe, "image-to-image" if is_of_text else None).to(self._device)
        self._pipe.set_progress_bar_config(disable=True)
        return type(self._pipe).__name__

    def run(self) -> int:
        """Generate images until the session sends EndStream; returns how many. Raises the errors of the pipeline."""
        context, transport = self._context, self._watched()
        comm = None if transport is None else Communicator(transport, context.beat, context.seal)
        stage = ImageStage(self._pipe, context.rank, context.world_size, comm, context.beat)
        return stage.run(self._take, self._put)

    def _take(self, patience: float) -> ImageRequest | EndStream | None:
        message = self._context.receive(min(patience, self._context.deadline / 4))
        self._context.beat("stream")
        return message if isinstance(message, ImageRequest | EndStream) else None

    def _put(self, number: int, result: Any) -> None:
        self._context.emit(GeneratedImage(number=number, image=result.images[0]))
