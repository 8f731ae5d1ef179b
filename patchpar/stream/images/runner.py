"""Runner of an image stream on one rank: loads the whole pipeline, and generates the images that come to this rank."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

from patchpar.models.empty_schedule import empty_schedules_refused
from patchpar.models.info import denoisers_of
from patchpar.models.loading import for_task, load_pipeline, with_dtype
from patchpar.shard.hooks import HookSet
from patchpar.stream.messages import ImageRequest
from patchpar.stream.rank_runner import RankRunner


class ImageRunner(RankRunner):
    """One rank of an image stream. Ranks exchange nothing."""

    def load(self, model: str, options: Mapping[str, Any], takes_image: bool = False) -> str:
        """Load with diffusers, from safetensors only; returns the name of the pipeline's class. Raises PlanError."""
        pipe = load_pipeline(model, with_dtype(options))
        is_of_text = takes_image and "image" not in signature(pipe.__call__).parameters
        self._pipe = for_task(pipe, "image-to-image" if is_of_text else None).to(self._device)
        self._pipe.set_progress_bar_config(disable=True)
        return type(self._pipe).__name__

    def generate(self, request: ImageRequest) -> Any:
        """Return the image of a request, the first one that the pipeline returns. Raises the pipeline's errors."""
        generator = torch.Generator().manual_seed(request.seed)
        with HookSet() as hooks, empty_schedules_refused(self._pipe, request.arguments):
            for denoiser in denoisers_of(self._pipe).values():
                hooks.before(denoiser, lambda *_: self._context.beat("denoiser"))
            return self._pipe(**request.arguments, generator=generator).images[0]
