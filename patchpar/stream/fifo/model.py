"""A video model as the source of a stream without end: its conditions, its queue of frames, and its decoder.

Shapes: B batch, C channels, F latent frames, H x W latent pixels, T text tokens, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError
from patchpar.stream.causal.decoder import as_pixels
from patchpar.stream.causal.wan import PromptBlend
from patchpar.stream.events import Change, Prompt
from patchpar.stream.fifo.network import FrameDecoder, FrameNetwork
from patchpar.stream.fifo.queue import FifoOptions, FrameQueue, entering_noise, first_queue, generate_first_video


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoStreamOptions:
    """What one stream is: latents of `height` x `width`, its noise, and how far guidance leads; 1 for no guidance.

    `first_frame`: the number of its first frame, above 0 where an interrupted stream goes on.
    """

    height: int
    width: int
    seed: int
    guidance_scale: float = 1.0
    first_frame: int = 0


class FifoModel:
    """A stream of one network. Each rank has its own.

    `decoder`: None on ranks that decode nothing; those that generate nothing need the shapes of the network only.
    """

    def __init__(
        self,
        network: FrameNetwork,
        decoder: FrameDecoder | None,
        queue: FifoOptions,
        options: FifoStreamOptions,
    ) -> None:
        self.queue, self.first_frame = queue, options.first_frame
        self._network, self._decoder, self._options = network, decoder, options
        self._prompt: Prompt | None = None
        self._blending: tuple[PromptBlend, PromptBlend | None] | None = None

    def payload(self) -> tuple[TensorSpec, ...]:
        """What a frame is on its way: latents in float32."""
        options = self._options
        return (TensorSpec((1, self._network.channels, 1, options.height, options.width), torch.float32),)

    def entering(self, block: int) -> Tensor:
        """The noise of frame number `block`."""
        return entering_noise(self._options.seed, block, self.payload()[0].shape).to(self._network.device)

    def apply(self, change: Change) -> None:
        """Another prompt from the next tick on, at once or in a blend. Raises PlanError."""
        if not isinstance(change, Prompt):
            raise PlanError(f"{type(change).__name__}: all that can change in this stream is its prompt")
        if change.transition in ("cut", "recache"):
            raise PlanError(
                f"transition={change.transition!r}: this stream has no window to forget: use 'switch' or 'blend'"
            )
        if self._guided and change.negative is None:
            raise PlanError("guidance needs a negative prompt beside each prompt, which may be empty")
        self._blending = None
        if change.transition == "blend":
            self._blending = self._blend(change)
            return
        self._prompt = change

    def _blend(self, change: Prompt) -> tuple[PromptBlend, PromptBlend | None]:
        now = self._prompt
        assert now is not None, "a stream begins with a prompt"
        if now.text.shape != change.text.shape:
            raise PlanError(
                f"a text of {tuple(change.text.shape)} cannot be blended with one of {tuple(now.text.shape)}: use "
                "'switch'"
            )
        negative = None
        if now.negative is not None and change.negative is not None:
            negative = PromptBlend(start=now.negative, end=change.negative, over=change.over)
        return PromptBlend(start=now.text, end=change.text, over=change.over), negative

    @property
    def _guided(self) -> bool:
        return self._options.guidance_scale > 1

    @torch.no_grad()
    def first_queue(self, zones: range, wanted: Callable[[], bool]) -> FrameQueue:
        """The queue that a stream begins with, of these zones; whatever has been reached if it is no longer wanted."""
        first, window = self._options.first_frame, self.queue.window
        noise = torch.cat([self.entering(first + frame) for frame in range(window)], 2)
        video = generate_first_video(self.queue, noise, self._velocity, wanted)
        return first_queue(self.queue, zones, video, self._options.seed, first)

    @torch.no_grad()
    def advance(self, queue: FrameQueue) -> None:
        """One tick of a queue, after its shift."""
        if self._blending is not None and self._prompt is not None:
            text, negative = self._blending
            self._prompt = replace(
                self._prompt, text=text.advance(), negative=None if negative is None else negative.advance()
            )
            self._blending = None if text.done == text.over else self._blending
        queue.advance(self._velocity)

    def _velocity(self, x_BCFHW: Tensor, sigmas: Sequence[float]) -> Tensor:
        prompt = self._prompt
        assert prompt is not None, "a stream begins with a prompt"
        found = self._network.predict(x_BCFHW, sigmas, prompt.text)
        if not self._guided or prompt.negative is None:
            return found
        away = self._network.predict(x_BCFHW, sigmas, prompt.negative)
        return away + self._options.guidance_scale * (found - away)

    @property
    def decoder(self) -> FrameDecoder:
        """Of the rank that decodes."""
        assert self._decoder is not None, "this rank was not given a decoder"
        return self._decoder

    @torch.no_grad()
    def decode(self, memory: object, frame: Tensor | None) -> Tensor:
        """Images (frames, height, width, 3) in uint8, as far as settled by this latent frame; None ends the video."""
        decoder = self.decoder
        return as_pixels(decoder.finish(memory) if frame is None else decoder.decode(memory, frame))
