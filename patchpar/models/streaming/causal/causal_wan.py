"""`CausalWan`: a diffusers Wan transformer made block-causal by a processor at each self-attention.

Weights, LoRA and the rest of the forward are diffusers' own, and `restore` removes all processors and hooks. One
transformer serves any number of KV windows. Method: Live Avatar (arXiv:2512.04677, sections 4.1 to 4.3), where each
denoising step keeps keys and values of its own noise level only; blocks with KV caches as in CausVid
(arXiv:2412.07772).

Shapes: B batch, C channels, F latent frames, H x W latent pixels, N blocks, T text tokens, D width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.speech.parts import SpeechParts
from patchpar.models.streaming.causal.attention_passes import BlockPass, KVWindow, SinkPass, WindowSize
from patchpar.models.streaming.causal.audio_conditioner import AudioConditioner
from patchpar.models.streaming.causal.rope import PatchGrid, Rotary, RotaryPositions
from patchpar.models.streaming.causal.step_sharding import ShardedFrames, StepGroup
from patchpar.models.streaming.config import CausalOptions
from patchpar.shard.hooks import HookSet

Hearing = AudioConditioner | SpeechParts
"""What gives a transformer cross-attention to audio."""


class BlockAudio(NamedTuple):
    """The audio of a block: audio tokens [S, F, n, C], and the factor of their attention output.

    `masks`: where each of S speakers is, by patches [S, rows, columns]; None for one, who is everywhere.
    """

    tokens_SFnC: Tensor
    scale: float = 1.0
    masks: Tensor | None = None


class BlockInputs(NamedTuple):
    """Number of a block, its timestep, 0 to 1000, and its audio.

    `advances`: its keys and values take the oldest slot of the window; False replaces those of the newest block.
    `pose`: latents [1, C, F, H, W] of its pose, where the transformer takes one; None for zeros.
    """

    block: int
    timestep: float
    audio: BlockAudio | None = None
    advances: bool = True
    pose: Tensor | None = None


class CausalWan:
    """A `WanTransformer3DModel` called with one block of a stream at a time. Raises UnsupportedModel.

    `audio`: cross-attention to audio after some of its blocks, or None. `inner`: the ranks among which every forward
    pass is split; all of them have to make the same calls.
    """

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        options: CausalOptions,
        audio: Hearing | None = None,
        inner: StepGroup | None = None,
    ) -> None:
        _refuse(transformer)
        self.transformer, self.options, self.audio, self.inner = transformer, options, audio, inner
        self._passing = CurrentPass()
        self._positions: dict[PatchGrid, RotaryPositions] = {}
        self._hooks = HookSet()
        if inner is not None:
            split_tokens(self._hooks, transformer, self._passing)
        for layer, block in enumerate(transformer.blocks):
            self._hooks.replace(block.attn1, "processor", CausalProcessor(layer, self._passing))
            if audio is not None and layer in audio.config.after:
                self._hooks.after(block, partial(self._add_audio, audio, layer))

    def restore(self) -> None:
        """Restore the transformer to its original state."""
        self._hooks.close()

    def memory(self, height: int, width: int) -> KVWindow:
        """Return an empty KV window for one denoising step of a stream with latents of `height` x `width`.

        Raises PlanError for a size that patches do not divide.
        """
        config = self.transformer.config
        tokens, heads = self._grid(height, width).tokens, config.num_attention_heads
        size = WindowSize(
            layers=len(self.transformer.blocks),
            window=self.options.window,
            block_tokens=self.options.frames * tokens,
            sink_tokens=self._sink_tokens(height, width),
            heads=heads if self.inner is None else len(self.inner.heads(heads).query),
            head_width=config.attention_head_dim,
            sinks=self.options.sinks,
        )
        return KVWindow(size, self.transformer.device, self.transformer.dtype)

    def _sink_tokens(self, height: int, width: int) -> int:
        """Tokens of the sink of latents of this size."""
        return self._grid(height, width).tokens

    def _sink_rotary(self, latents_BCFHW: Tensor, block: int) -> Rotary | None:
        """Positions of the sink as block `block` sees it; None for those of one frame."""
        return None

    def remember_sink(
        self, memory: KVWindow, latents_BCFHW: Tensor, text_BTD: Tensor, video_BCFHW: Tensor | None = None
    ) -> None:
        """Store one clean latent frame [1, C, 1, H, W] in `memory` as its sink. `video_BCFHW`: see SpeechWan.

        Raises PlanError.
        """
        now = SinkPass(memory, self._at(latents_BCFHW).at([0]))
        with self._during(now, frames=self._shared(latents_BCFHW)):
            self._forward(latents_BCFHW, latents_BCFHW.new_zeros(1, dtype=torch.float32), text_BTD)

    def velocity(self, memory: KVWindow, x_BCFHW: Tensor, text_BTD: Tensor, inputs: BlockInputs) -> Tensor:
        """Return the transformer's prediction for one block, [1, C, F, H, W].

        Stores the block's keys and values in `memory`; blocks have to be called in order. Raises PlanError.
        """
        if inputs.advances:
            memory.advance()
        sink = self._sink_rotary(x_BCFHW, inputs.block)
        now = BlockPass(memory, self._at(x_BCFHW), self.options, inputs.block, sink)
        with self._during(now, inputs.audio, frames=self._shared(x_BCFHW)):
            timestep = torch.full((1,), inputs.timestep, device=x_BCFHW.device)
            return self._forward(x_BCFHW, timestep, text_BTD)

    def _forward(self, x_BCFHW: Tensor, timestep: Tensor, text_BTD: Tensor) -> Tensor:
        return self.transformer(x_BCFHW, timestep, text_BTD, return_dict=False)[0]

    @contextmanager
    def _during(
        self, now: SinkPass | BlockPass, audio: BlockAudio | None = None, *, frames: ShardedFrames | None = None
    ) -> Iterator[None]:
        passing = self._passing
        passing.now, passing.frames = now, frames
        if self.audio is not None and audio is not None:
            passing.audio, passing.audio_scale = self.audio.encode(audio.tokens_SFnC), audio.scale
            passing.parts = None if audio.masks is None else parts_of(audio, frames)
        try:
            yield
        finally:
            passing.now = passing.audio = passing.parts = passing.frames = None

    def _add_audio(self, audio: Hearing, layer: int, module: nn.Module, args: Any, hidden_BLD: Tensor) -> Tensor | None:
        """Add the audio attention to the tokens after one block, as a forward hook; None leaves them unchanged."""
        tokens, parts = self._passing.audio, self._passing.parts
        if tokens is None:
            return None
        if parts is None:
            return hidden_BLD + self._passing.audio_scale * audio(layer, hidden_BLD, tokens)
        voices = zip(torch.split(parts, 1, 2), torch.split(tokens, 1), strict=True)
        heard = sum((part * audio(layer, hidden_BLD, voice) for part, voice in voices), torch.zeros_like(hidden_BLD))
        return hidden_BLD + self._passing.audio_scale * heard

    def _shared(self, x_BCFHW: Tensor) -> ShardedFrames | None:
        """The sharding of a forward pass over these latents; None on a single rank."""
        if self.inner is None:
            return None
        return self.inner.of_frames(x_BCFHW.shape[2], self._grid(*x_BCFHW.shape[3:]).tokens)

    def _grid(self, height: int, width: int) -> PatchGrid:
        _, rows, columns = self.transformer.config.patch_size
        if height % rows or width % columns:
            raise PlanError(
                f"latents of {height} x {width} are no multiple of patches of {rows} x {columns}: choose a height and "
                "width that are"
            )
        return PatchGrid(rows=height // rows, columns=width // columns)

    def _at(self, x_BCFHW: Tensor) -> RotaryPositions:
        """Positions on the grid of these latents, cached."""
        grid = self._grid(*x_BCFHW.shape[3:])
        if grid not in self._positions:
            rope = self.transformer.rope
            widths = (rope.t_dim, rope.h_dim, rope.w_dim)
            self._positions[grid] = RotaryPositions(widths, grid, x_BCFHW.device)
        return self._positions[grid]


@dataclass(slots=True, kw_only=True)
class CurrentPass:
    """State of the current forward pass. `frames`: its sharding, or None if this rank computes all of it.

    `parts`: of each token how much it belongs to each speaker, [1, L, S]; None for one speaker.
    """

    now: SinkPass | BlockPass | None = None
    frames: ShardedFrames | None = None
    audio: Tensor | None = None
    audio_scale: float = 1.0
    parts: Tensor | None = None


def parts_of(audio: BlockAudio, frames: ShardedFrames | None) -> Tensor:
    """Return how much each of this rank's tokens belongs to each speaker, [1, l, S]: the same in all frames."""
    assert audio.masks is not None, "a single speaker has no mask"
    whole = audio.masks.flatten(1).T.repeat(audio.tokens_SFnC.shape[1], 1)[None]
    return whole if frames is None else frames.own(whole)


class CausalProcessor:
    """Wan's self-attention with other keys and values. `set_attention_backend` of diffusers chooses its kernel."""

    _attention_backend: Any = None

    def __init__(self, layer: int, passing: CurrentPass) -> None:
        self._layer, self._passing = layer, passing

    def __call__(self, attn: Any, hidden_states: Tensor, *_: object) -> Tensor:
        """Compute the same as WanAttnProcessor, with the operands of the current pass; hidden_states: [B, l, D]."""
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(q), attn.norm_k(k), v))
        frames = self._passing.frames
        if frames is None:
            out = self._see(q, k, v)
        else:
            out = frames.attend(f"blocks.{self._layer}.attn1", (q, k, v), self._see)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))

    def _see(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        now = self._passing.now
        assert now is not None, "a block-causal transformer must be called through CausalWan"
        queries, keys, values, mask = now.attend(self._layer, q, k, v)
        return dispatch_attention_fn(queries, keys, values, attn_mask=mask, backend=self._attention_backend)


def split_tokens(hooks: HookSet, transformer: WanTransformer3DModel, passing: CurrentPass) -> None:
    """In sharded passes, keep only this rank's tokens from the first block on, and gather all after the last layer."""

    def split(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        frames = passing.frames
        return None if frames is None else (frames.own(args[0]), *args[1:])

    def gather(module: nn.Module, args: tuple[Any, ...], out_BlD: Tensor) -> Tensor | None:
        frames = passing.frames
        return None if frames is None else frames.whole("proj_out", out_BlD)

    hooks.before(transformer.blocks[0], split)
    hooks.after(transformer.proj_out, gather)


def _refuse(transformer: WanTransformer3DModel) -> None:
    config = transformer.config
    if config.patch_size[0] != 1:
        raise UnsupportedModel(
            f"patches of {config.patch_size[0]} frames: a block-causal stream needs patches of 1 frame"
        )
    if config.image_dim is not None or config.added_kv_proj_dim is not None:
        raise UnsupportedModel(
            "this transformer attends to an image embedding besides its text: load a text-to-video checkpoint, whose "
            "reference is its sink frame, or Wan 2.2, which takes images in the latent channels"
        )
