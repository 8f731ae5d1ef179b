"""What a queue of frames asks of a video model: a transformer told a noise level for every frame, and a decoder."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from patchpar.stream.causal.checkpoint import RequiredWeights
from patchpar.stream.messages import ModelFacts


class FrameNetwork(ABC):
    """A transformer of diffusers that predicts for frames whose noise levels differ.

    Shapes: B batch, C channels, F frames, H x W latent pixels, T text tokens, D width.
    """

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer

    @property
    def channels(self) -> int:
        """Of the latents."""
        return int(self._transformer.config.in_channels)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        device: torch.device = self._transformer.device
        return device

    @abstractmethod
    def predict(self, x_BCFHW: Tensor, sigmas: Sequence[float], text_BTD: Tensor) -> Tensor:
        """Noise less clean frame, in float32, of frames at these levels, 0 to 1."""


class FrameDecoder(Protocol):
    """From finished latent frames to images, as they come. The first gives one, each further one `per_latent`."""

    @property
    def per_latent(self) -> int:
        """Images of a latent frame, beyond the first."""

    def new_state(self) -> Any:
        """What is remembered of a video: nothing yet."""

    def decode(self, state: Any, latents_BCFHW: Tensor) -> Tensor:
        """Images (frames, 3, height, width) between -1 and 1, as far as they are settled."""

    def finish(self, state: Any) -> Tensor:
        """Those that are still missing when a video ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptToEncode:
    """A prompt to be encoded. `negative`: what guidance leads away from, None for no guidance. `tokens`: at most."""

    text: str
    negative: str | None
    tokens: int


class ModelFamily(Protocol):
    """A kind of model: how its parts are loaded and called."""

    def load(self, folder: Path, needs: RequiredWeights, options: Mapping[str, Any]) -> Any:
        """Its pipeline with None for what is not needed. Raises PlanError, UnsupportedModel."""

    def facts(self, folder: Path) -> ModelFacts:
        """What a session must know, from the folder alone."""

    def network(self, transformer: Any, facts: ModelFacts, fps: float) -> FrameNetwork:
        """Its transformer, which may have no weights where nothing is generated. Raises UnsupportedModel."""

    def decoder(self, vae: Any) -> FrameDecoder:
        """Its decoder. Raises UnsupportedModel."""

    def encode(self, pipe: Any, asked: PromptToEncode, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Embeddings (1, T, D) of a text, and of the one to lead away from."""
