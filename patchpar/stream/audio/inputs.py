"""`AudioInputs`: what a model makes of the audio of a block, in the process that has the audio."""

from typing import Protocol

from torch import Tensor


class AudioInputs(Protocol):
    """Properties of a model that takes audio, without its weights: AudioConfig, SpeechConfig."""

    @property
    def rate(self) -> int:
        """Samples per second."""

    @property
    def fps(self) -> float:
        """Image frames per second."""

    @property
    def per_latent(self) -> int:
        """Image frames per latent frame after the first."""

    @property
    def before(self) -> int:
        """Image frames before a block whose samples it needs."""

    def shape(self, frames: int) -> tuple[int, ...]:
        """Return the shape of the inputs of a block of `frames` latent frames."""

    def inputs(self, samples_N: Tensor, images: range, latents: range) -> Tensor:
        """Return the inputs of the latent frames `latents`, of `shape`.

        `samples_N`: mono samples of the image frames `images`, the last of which is that of the last latent frame.
        Before image frame 0 there is silence. Raises PlanError.
        """
