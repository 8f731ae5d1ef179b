"""Interface of a video model for a frame queue: a transformer with a noise level per frame, and a decoder."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from patchpar.stream.causal.checkpoint import RequiredWeights
from patchpar.stream.messages import ModelFacts


class FrameNetwork(ABC):
    """A transformer called with frames of different noise levels: [B, C, F, H, W], texts [B, T, D]."""

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        return int(self._transformer.config.in_channels)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._transformer.device

    @abstractmethod
    def predict(self, x_BCFHW: Tensor, sigmas: Sequence[float], text_BTD: Tensor) -> Tensor:
        """Return the velocity [B, C, F, H, W], noise minus clean frame, in float32. `sigmas`: F levels from 0 to 1."""


class FrameDecoder(Protocol):
    """Decode finished latent frames one by one. The first gives one image, each further one `per_latent`."""

    @property
    def per_latent(self) -> int:
        """Images per latent frame after the first."""

    def new_state(self) -> Any:
        """Return the empty state of a new video."""

    def decode(self, state: Any, latents_BCFHW: Tensor) -> Tensor:
        """Return the images that no later frame changes, [frames, 3, height, width] between -1 and 1."""

    def finish(self, state: Any) -> Tensor:
        """Return the images left at the end of a video, [frames, 3, height, width] between -1 and 1."""


class ModelFamily(Protocol):
    """How the parts of one kind of model are loaded and called. `decoder`: wraps its VAE. Raises UnsupportedModel."""

    decoder: Callable[[Any], FrameDecoder]

    def load(self, folder: Path, needs: RequiredWeights, options: Mapping[str, Any]) -> Any:
        """Load its pipeline, with None for parts that are not needed. Raises PlanError, UnsupportedModel."""

    def facts(self, folder: Path) -> ModelFacts:
        """Read what a session must know from the configuration files of the folder."""

    def network(self, transformer: Any, facts: ModelFacts, fps: float) -> FrameNetwork:
        """Wrap its transformer, which has no weights on ranks that do not denoise. Raises UnsupportedModel."""

    def encode(self, pipe: Any, text: str, negative: str | None, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return embeddings [1, T, D] of the prompt and of the negative prompt, None without guidance.

        `options`: of the pipeline's own `encode_prompt`.
        """
        text_BTD, negative_BTD = encode_prompt(pipe, text, negative, **options)
        return text_BTD, negative_BTD


def encode_prompt(pipe: Any, text: str, negative: str | None, **options: Any) -> Any:
    """Return what the pipeline's own `encode_prompt` returns."""
    has_guidance = negative is not None
    return pipe.encode_prompt(text, negative_prompt=negative, do_classifier_free_guidance=has_guidance, **options)
