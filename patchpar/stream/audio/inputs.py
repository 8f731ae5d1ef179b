"""The audio of a stream block by block, and what a model makes of it, in the process that has the audio."""

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


class AudioSource(Protocol):
    """The source of a stream's audio; all of it is there, unless a source says otherwise."""

    def is_here(self, block: int) -> bool:
        """Whether all audio that block `block` needs is available."""
        return True

    def seconds_until_silence(self, block: int) -> float | None:
        """How long a block waits for its audio until silence takes its place; None for ever."""
        return None

    def is_over(self, block: int) -> bool:
        """Whether the audio ends before this block begins."""

    def take(self, block: int) -> tuple[Tensor, Tensor]:
        """Return (audio tokens [1, F, n, C], samples [N]) of a block."""
