"""`CleanHistoryStream`: blocks attend to finished blocks, as in Self-Forcing (arXiv:2506.08009, algorithm 2).

    step of a block    all denoising steps, then a pass at noise level 0 that stores the keys and values of later blocks

All steps of a block read one window, and a block can begin when the one before is finished. So the steps are one stage
of the pipeline, which several ranks can share, and only decoding runs beside it:

    frames per second = F / max(T c + c, v)    F frames a block, T steps and the last pass of c seconds, v to decode
"""

from __future__ import annotations

import torch

from patchpar.errors import UnsupportedModel
from patchpar.stream.causal.wan import StepState, WanStream
from patchpar.stream.causal_model import Payload

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
        """Denoise a block, and store the keys and values of the result."""
        self._blend(state)
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
