"""A block-causal Wan transformer on many blocks at once, under a mask: differentiable, so that it can be trained.

It is the same function as the transformer of a stream, block by block with a window of keys and values.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from patchpar.errors import PlanError
from patchpar.models.streaming.causal.attention_passes import AttentionOperands
from patchpar.models.streaming.causal.causal_wan import BlockAudio, CausalWan
from patchpar.models.streaming.causal.rope import RotaryPositions, rotate
from patchpar.models.streaming.config import CausalOptions
from patchpar.shard.hooks import HookSet


class BandedWan(CausalWan):
    """A CausalWan on one rank with `banded` beside `velocity`."""

    def banded(
        self,
        x_BCFHW: Tensor,
        timesteps_BN: Tensor,
        text_BTD: Tensor,
        *,
        sink_BCFHW: Tensor | None = None,
        audio_BFnC: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction for N blocks in one forward under a mask, [B, C, F, H, W] with F = N * frames.

        The same function as `velocity` block by block, but differentiable. `timesteps_BN`: a timestep, 0 to 1000, for
        each block; these may differ. `sink_BCFHW`: one clean frame. `audio_BFnC`: tokens of all F latent frames.
        Raises PlanError.
        """
        positions = self._at(x_BCFHW)
        blocks, rest = divmod(x_BCFHW.shape[2], self.options.frames)
        if rest or timesteps_BN.shape[1] != blocks:
            raise PlanError(
                f"{x_BCFHW.shape[2]} latent frames and {timesteps_BN.shape[1]} noise levels: "
                f"a block has {self.options.frames} frames and one noise level"
            )
        levels = timesteps_BN.repeat_interleave(self.options.frames * positions.grid.tokens, 1)
        if sink_BCFHW is not None:
            levels = torch.cat([levels.new_zeros(len(levels), positions.grid.tokens), levels], 1)
            x_BCFHW = torch.cat([sink_BCFHW, x_BCFHW], 2)
        banded = BandedPass(positions, self.options, blocks, sink_BCFHW is not None)
        silent = positions.grid.tokens if sink_BCFHW is not None else 0
        audio = None if audio_BFnC is None else BlockAudio(audio_BFnC)
        with HookSet() as hooks, self._during(banded, audio):
            if self.audio is not None:
                hooks.replace(self.audio, "forward", partial(_after_front, self.audio.forward, silent))
            out = self._forward(x_BCFHW, levels, text_BTD)
        return out[:, :, 1:] if sink_BCFHW is not None else out


class BandedPass:
    """`blocks` blocks at once, after a sink frame if `has_sink`. Every block has its own copy of the sink's keys."""

    def __init__(self, positions: RotaryPositions, options: CausalOptions, blocks: int, has_sink: bool) -> None:
        frames, n = options.frames, positions.grid.tokens
        self._sink_tokens = n if has_sink else 0
        starts = [block * frames for block in range(blocks)]
        own = ([0] if has_sink else []) + list(range(blocks * frames))
        self._own = positions.at(own)
        self._copies = positions.at([start + options.sink_distance for start in starts]) if has_sink else None
        self._blocks = blocks
        block = torch.arange(blocks).repeat_interleave(frames * n)
        age = block[:, None] - block[None, :]
        band = (age >= 0) & (age < options.window)
        self.mask = (_with_sink(band, block, n, blocks) if has_sink else band).to(positions.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> AttentionOperands:
        """Attend under the mask; keys are those of all tokens [B, L, n, d], then one copy of the sink per block."""
        keys, values = rotate(k, self._own), v
        if self._copies is not None:
            sinks, sink_values = (x[:, : self._sink_tokens].repeat(1, self._blocks, 1, 1) for x in (k, v))
            keys, values = torch.cat([keys, rotate(sinks, self._copies)], 1), torch.cat([v, sink_values], 1)
        return AttentionOperands(rotate(q, self._own), keys, values, self.mask)


def _with_sink(band: Tensor, block: Tensor, n: int, blocks: int) -> Tensor:
    """The mask with the sink's n tokens in front, which attend to themselves only, and its copies at the end."""
    length = len(block)
    mask = torch.zeros(n + length, n + length + blocks * n, dtype=torch.bool)
    mask[:n, :n] = True
    mask[n:, n : n + length] = band
    mask[n:, n + length :] = block[:, None] == torch.arange(blocks).repeat_interleave(n)[None, :]
    return mask


def _after_front(
    forward: Callable[[int, Tensor, Tensor], Tensor], silent: int, layer: int, hidden_BLD: Tensor, audio_BFnD: Tensor
) -> Tensor:
    """The audio attention of all tokens but the first, which are the sink's: nothing is added to these."""
    return functional.pad(forward(layer, hidden_BLD[:, silent:], audio_BFnD), (0, 0, silent, 0))
