"""Runner of an image stream on one rank: loads the whole pipeline, and generates the images that come to this rank."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

from patchpar.models.empty_schedule import empty_schedules_refused
from patchpar.models.info import denoisers_of
from patchpar.models.loading import for_task, load_pipeline, with_dtype
from patchpar.shard.hooks import HookSet
from patchpar.stream.messages import EndStream, GeneratedImage, ImageRequest
from patchpar.stream.rank_runner import RankRunner

REST_SECONDS = 5.0
"""Seconds between heartbeats of a rank that waits for requests."""


class ImageRunner(RankRunner):
    """One rank of an image stream. Ranks exchange nothing."""

    def load(self, model: str, options: Mapping[str, Any], takes_image: bool = False) -> str:
        """Load with diffusers, from safetensors only; returns the name of the pipeline's class. Raises PlanError."""
        pipe = load_pipeline(model, with_dtype(options))
        is_of_text = takes_image and "image" not in signature(pipe.__call__).parameters
        self._pipe = for_task(pipe, "image-to-image" if is_of_text else None).to(self._device)
        self._pipe.set_progress_bar_config(disable=True)
        return type(self._pipe).__name__

    def run(self) -> int:
        """Generate images until the session sends EndStream; returns how many. Raises the errors of the pipeline."""
        context, generated = self._context, 0
        with HookSet() as hooks:
            for denoiser in denoisers_of(self._pipe).values():
                hooks.before(denoiser, lambda *_: context.beat("denoiser"))
            while True:
                message = context.receive(min(REST_SECONDS, context.deadline / 4))
                context.beat("stream")
                if isinstance(message, EndStream):
                    return generated
                if isinstance(message, ImageRequest):
                    context.emit(GeneratedImage(number=message.number, image=self._generated(message)))
                    generated += 1

    def _generated(self, request: ImageRequest) -> Any:
        generator = torch.Generator().manual_seed(request.seed)
        with empty_schedules_refused(self._pipe, request.arguments):
            return self._pipe(**request.arguments, generator=generator).images[0]
