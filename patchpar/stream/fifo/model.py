"""State of one FIFO stream on a rank: its prompt, the network that denoises its frame queue, and its decoder.

Shapes: B batch, C channels, F latent frames, H x W latent pixels, T text tokens, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.shard.host_memory import to_device
from patchpar.stream.causal.conditions import PromptBlend
from patchpar.stream.causal.decoder import as_pixels
from patchpar.stream.causal_model import Payload
from patchpar.stream.events import Change, Prompt
from patchpar.stream.fifo.network import FrameDecoder, FrameNetwork
from patchpar.stream.fifo.queue import FIRST_NOISE, FifoOptions, FrameQueue, first_queue, generate_first_video
from patchpar.stream.flow_schedule import keyed_noise
from patchpar.stream.messages import StreamRun


class FifoModel:
    """One stream on this rank. Without denoising `network` has no weights; without decoding `decoder` is None."""

    def __init__(self, network: FrameNetwork, decoder: FrameDecoder | None, queue: FifoOptions, run: StreamRun) -> None:
        self.queue, self.first_frame = queue, run.first_block
        self._network, self._decoder, self._run = network, decoder, run
        self._prompt: Prompt | None = None
        self._blending: tuple[PromptBlend, ...] = ()  # of the prompt, and of the negative prompt if there is one

    def payload(self) -> tuple[TensorSpec, ...]:
        """Return shape and dtype of the frame passed from rank to rank: latents [1, C, 1, H, W] in float32."""
        return (TensorSpec((1, self._network.channels, 1, self._run.rows, self._run.columns), torch.float32),)

    def begin(self, block: int, inputs: Payload) -> Payload:
        """Return the noise [1, C, 1, H, W] of frame number `block`."""
        noise = keyed_noise(self._run.seed, block, FIRST_NOISE, self.payload()[0].shape)
        return (to_device(noise, self._network.device),)

    def apply(self, change: Change) -> None:
        """Set another prompt from the next tick on, at once or in a blend. Raises PlanError."""
        assert isinstance(change, Prompt), "a FifoSession changes nothing else"
        if change.transition == "blend":
            now = self._prompt
            assert now is not None, "a stream begins with a prompt"
            texts = ((now.text, change.text), (now.negative, change.negative))
            self._blending = tuple(
                PromptBlend(start=start, end=end, over=change.over)
                for start, end in texts
                if start is not None and end is not None
            )
        else:
            self._prompt, self._blending = change, ()

    @torch.no_grad()
    def first_queue(self, zones: range, wanted: Callable[[], bool]) -> FrameQueue:
        """Return the first queue of a stream, these zones of it. Denoising stops early if not `wanted`."""
        first, window = self.first_frame, self.queue.window
        noise = torch.cat([self.begin(first + frame, ())[0] for frame in range(window)], 2)
        video = generate_first_video(self.queue, noise, self._velocity, wanted)
        return first_queue(self.queue, zones, video, self._run.seed, first)

    @torch.no_grad()
    def advance(self, queue: FrameQueue) -> None:
        """Denoise a queue by one tick, after its `shift`."""
        if self._blending and self._prompt is not None:
            self._blending = tuple(blend.advanced() for blend in self._blending)
            text, *negative = (blend.text for blend in self._blending)
            self._prompt = replace(self._prompt, text=text, negative=negative[0] if negative else None)
            self._blending = () if self._blending[0].is_done else self._blending
        queue.advance(self._velocity)

    def _velocity(self, x_BCFHW: Tensor, sigmas: Sequence[float]) -> Tensor:
        prompt = self._prompt
        assert prompt is not None, "a stream begins with a prompt"
        conditional = self._network.predict(x_BCFHW, sigmas, prompt.text)
        if self._run.guidance_scale <= 1 or prompt.negative is None:
            return conditional
        unconditional = self._network.predict(x_BCFHW, sigmas, prompt.negative)
        return unconditional + self._run.guidance_scale * (conditional - unconditional)

    @property
    def decoder(self) -> FrameDecoder:
        """The decoder, on the rank that decodes."""
        assert self._decoder is not None, "this rank has no decoder"
        return self._decoder

    @torch.no_grad()
    def decode(self, memory: object, frame: Tensor | None) -> Tensor:
        """Return the images [frames, height, width, 3] in uint8 that are final after this frame; None is the end."""
        decoder = self.decoder
        return as_pixels(decoder.finish(memory) if frame is None else decoder.decode(memory, frame))
