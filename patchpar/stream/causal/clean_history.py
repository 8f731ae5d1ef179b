"""Blocks that attend to finished blocks, whose keys and values are computed once, or anew for each block.

`CleanHistoryStream`, as in Self-Forcing (arXiv:2506.08009, algorithm 2):

    step of a block    all denoising steps, then a pass at noise level 0 that stores the keys and values of later blocks

`RecomputedHistoryStream`, as in Krea Realtime:

    step of a block    a pass at noise level 0 over the last window - 1 finished blocks, then all denoising steps

The frames of the window are its first ones in time: the window begins at position 0 for every block. Its oldest latent
frame, which stands for 4 images, is replaced by the encoding of the last of them, since Wan's autoencoder gives the
first latent frame of a video one image only. What both cost is in docs/stream-models.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.models.streaming.decoder import DecoderState, as_pixels
from patchpar.stream.causal.wan import StepState, WanStream
from patchpar.stream.stage_link import Payload

CLEAN = 0.0
"""The timestep of the pass that stores keys and values."""


class CleanHistoryStream(WanStream):
    """A WanStream whose only step is a whole block. Raises UnsupportedModel for a model of two transformers."""

    def _refuse(self) -> None:
        if self._low_noise is not None:
            raise UnsupportedModel(
                "history='clean' and 'recompute' keep one window of keys and values, but this model has two "
                "transformers: use history='noisy'"
            )

    @property
    def steps(self) -> int:
        """One: all denoising steps of a block."""
        return 1

    @torch.no_grad()
    def step(self, state: StepState, block: int, payload: Payload) -> Payload:
        state.now = state.now.advanced()
        state.memory.advance()
        finished = self._denoised(state, block, payload, position=block)
        self._predicted(state, block, finished, CLEAN, advances=False)
        state.recent.append((block, finished))
        return finished

    def _denoised(self, state: StepState, block: int, payload: Payload, *, position: int) -> Payload:
        """The payload of a block after all denoising steps. `position`: of the block in time, in blocks."""
        latents, *audio = payload
        for step in range(self._schedule.steps):
            timestep = self._schedule.timestep(step)
            velocity = self._predicted(state, position, (latents, *audio), timestep, advances=False)
            latents = self._schedule.advance(step, latents, velocity, self._noise(block, step))
        return latents, *audio

    def _recompute(self, state: StepState, block: int, payload: Payload) -> None:
        self._predicted(state, block, payload, CLEAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedBlock:
    """Latents and images [N, 3, H, W] of a block. `before`: latent frames that its decoder had had; `after`: itself."""

    latents: Tensor
    images: Tensor
    before: int
    after: DecoderState


@dataclass(slots=True, kw_only=True)
class RecomputeState(StepState):
    """`decoder`: of the stream's images. `images`: the newest [N, 3, H, W] of them, as many as the window needs."""

    decoder: DecoderState = field(default_factory=DecoderState)
    images: Tensor | None = None


class RecomputedHistoryStream(CleanHistoryStream):
    """A WanStream whose only step is a whole block. Raises UnsupportedModel for a model that takes an image."""

    _kind = RecomputeState
    _decoded: DecodedBlock | None = None

    def _refuse(self) -> None:
        super()._refuse()
        if self._is_conditioned:
            raise UnsupportedModel("history='recompute' is for text-to-video models: use 'noisy' or 'clean'")

    @torch.no_grad()
    def step(self, state: StepState, block: int, payload: Payload) -> Payload:
        """Compute the window anew, denoise a block, and decode it for the next window."""
        assert isinstance(state, RecomputeState)
        state.now = state.now.advanced()
        window = self._window(state)
        state.memory.forget()
        for number, past in enumerate(window):
            self._predicted(state, number, past, CLEAN)
        state.memory.advance()
        finished = self._denoised(state, block, payload, position=len(window))
        state.recent.append((block, finished))
        self._keep_images(state, finished[0])
        return finished

    def _recompute(self, state: StepState, block: int, payload: Payload) -> None:
        """Nothing: the next step does it."""

    def _window(self, state: RecomputeState) -> list[Payload]:
        """The payloads of the window's earlier blocks, the oldest first."""
        payloads = [payload for _, payload in state.recent]
        frames = len(payloads) * self._network.options.frames
        if not payloads or state.decoder.frames == frames:
            return payloads  # from the stream's first frame on, which stands for one image as it is
        assert state.images is not None, "the blocks of the window have been decoded"
        assert self._decoder is not None, "a stage that denoises has the decoder"
        per_latent = self._decoder.per_latent
        image = state.images[-1 - (frames - 1) * per_latent][None]
        latents, *audio = payloads[0]
        first = self._own(self._decoder.encode(image))
        return [(torch.cat([first, latents[:, :, 1:]], 2), *audio), *payloads[1:]]

    def _keep_images(self, state: RecomputeState, latents: Tensor) -> None:
        assert self._decoder is not None, "a stage that denoises has the decoder"
        before = state.decoder.frames
        images = self._decoder.decode(state.decoder, latents)
        self._decoded = DecodedBlock(latents=latents, images=images, before=before, after=state.decoder)
        options = self._network.options
        needed = 1 + ((options.window - 1) * options.frames - 1) * self._decoder.per_latent
        known = images if state.images is None else torch.cat([state.images, images])
        state.images = known[-max(1, needed) :]

    @torch.no_grad()
    def decode(self, decoder: DecoderState, payload: Payload) -> Tensor:
        """See WanStream. On the rank that has denoised the block, its images are there already."""
        known = self._decoded
        if known is None or known.latents is not payload[0] or known.before != decoder.frames:
            return super().decode(decoder, payload)  # another rank, or one of the two decoders was lost
        decoder.features, decoder.frames = list(known.after.features), known.after.frames
        return as_pixels(known.images)
