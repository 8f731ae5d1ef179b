"""`SpeechWan`: a Wan transformer with the other parts of Wan-S2V, block by block as in Live Avatar.

    buffer of a layer:   [ reference | earlier frames, packed | slot 0 | slot 1 | ... ]
                           rolls       stand

The sink has tokens of two kinds. The reference stays at a distance from every block, or at its place in training while
the stream is shorter than that; the packed frames before the video stay at their positions before it (arXiv:2512.04677,
section 4.3; the packed frames are those of the released code). Both attend to one another once, at noise level 0.

Shapes: B batch, C latent channels, F latent frames, H x W latent pixels, L tokens, D width.
"""

from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.speech.frame_packer import packed_grids
from patchpar.models.speech.parts import SpeechParts
from patchpar.models.streaming.causal.attention_passes import BlockPass, KVWindow, SinkPass
from patchpar.models.streaming.causal.causal_wan import BlockInputs, CausalWan
from patchpar.models.streaming.causal.rope import PatchGrid, Rotary, RotaryPositions
from patchpar.models.streaming.causal.step_sharding import StepGroup
from patchpar.models.streaming.config import CausalOptions

REFERENCE_TIME = 30
"""The reference's place in training, in latent frames after the first one of a video."""


class SpeechWan(CausalWan):
    """A CausalWan with `speech`. Raises UnsupportedModel, PlanError."""

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        options: CausalOptions,
        speech: SpeechParts,
        inner: StepGroup | None = None,
    ) -> None:
        _refuse(transformer, options, speech)
        super().__init__(transformer, options, speech, inner)
        self._speech = speech
        self._pose: Tensor | None = None
        self._packed: dict[tuple[int, int], Rotary] = {}
        self._hooks.after(transformer.patch_embedding, self._posed)

    def velocity(self, memory: KVWindow, x_BCFHW: Tensor, text_BTD: Tensor, inputs: BlockInputs) -> Tensor:
        self._pose = inputs.pose
        try:
            return super().velocity(memory, x_BCFHW, text_BTD, inputs)
        finally:
            self._pose = None

    def remember_sink(
        self, memory: KVWindow, latents_BCFHW: Tensor, text_BTD: Tensor, video_BCFHW: Tensor | None = None
    ) -> None:
        """Store a reference [1, C, 1, H, W], and earlier frames [1, C, F, H, W], as the sink. Raises PlanError."""
        if video_BCFHW is None:
            raise PlanError("this model generates from an image: begin the stream with reference=")
        patches = self.transformer.patch_embedding(latents_BCFHW)
        tokens = self._speech.sinks(patches, video_BCFHW)
        now = SinkPass(memory, self._rotary_of(latents_BCFHW, REFERENCE_TIME))
        frames = None if self.inner is None else self.inner.of_frames(1, tokens.shape[1])
        with self._during(now, frames=frames):
            self._through_blocks(tokens, text_BTD)

    def _through_blocks(self, hidden_BLD: Tensor, text_BTD: Tensor) -> None:
        """Run the transformer's blocks at timestep 0 on tokens that are no whole frames."""
        net: Any = self.transformer
        timestep = hidden_BLD.new_zeros(1, dtype=torch.float32)
        _, modulation, text, _ = net.condition_embedder(timestep, text_BTD, None, timestep_seq_len=None)
        for block in net.blocks:
            hidden_BLD = block(hidden_BLD, text, modulation.unflatten(1, (6, -1)), None)

    def _posed(self, module: nn.Module, args: Any, patches_BDFHW: Tensor) -> Tensor | None:
        """Add pose and kind to the patches of a block, as a forward hook; the sink has kinds of its own."""
        is_block = isinstance(self._passing.now, BlockPass)
        return self._speech.posed(patches_BDFHW, self._pose) if is_block else None

    def _sink_tokens(self, height: int, width: int) -> int:
        return super()._sink_tokens(height, width) + sum(grid.tokens for grid in packed_grids(height, width))

    def _sink_rotary(self, latents_BCFHW: Tensor, block: int) -> Rotary:
        start = block * self.options.frames
        return self._rotary_of(latents_BCFHW, max(REFERENCE_TIME, start + self.options.sink_distance))

    def _rotary_of(self, latents_BCFHW: Tensor, time: int) -> Rotary:
        """Positions of the sink with the reference at `time`."""
        reference, packed = self._at(latents_BCFHW).at([time]), self._packed_rotary(latents_BCFHW)
        cos, sin = (torch.cat(each, 1) for each in zip(reference, packed, strict=True))
        return cos, sin

    def _packed_rotary(self, latents_BCFHW: Tensor) -> Rotary:
        size = (latents_BCFHW.shape[3], latents_BCFHW.shape[4])
        if size not in self._packed:
            rope = self.transformer.rope
            widths = (rope.t_dim, rope.h_dim, rope.w_dim)
            parts = []
            for grid in packed_grids(*size):
                shape = PatchGrid(rows=len(grid.rows), columns=len(grid.columns))
                positions = RotaryPositions(widths, shape, latents_BCFHW.device, (grid.rows, grid.columns))
                parts.append(positions.at(grid.times))
            cos, sin = (torch.cat(each, 1) for each in zip(*parts, strict=True))
            self._packed[size] = cos, sin
        return self._packed[size]


def _refuse(transformer: WanTransformer3DModel, options: CausalOptions, speech: SpeechParts) -> None:
    config, found = transformer.config, speech.config
    width = config.num_attention_heads * config.attention_head_dim
    wanted = (width, config.num_attention_heads, config.in_channels)
    if (found.dim, found.heads, found.channels) != wanted or max(found.after, default=0) >= config.num_layers:
        raise UnsupportedModel(
            f"speech.json is of a transformer of width {found.dim}, {found.heads} heads, {found.channels} channels and "
            f"blocks up to {max(found.after, default=0)}, but this one has {wanted} and {config.num_layers} blocks"
        )
    if options.positions != "abs":
        raise PlanError(
            f"positions={options.positions!r}: earlier frames stand at times of their own, which needs positions='abs'"
        )
