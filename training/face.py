"""The networks of the embedded avatar, and a way to train them on whole clips that is the stream's own function.

A stream computes one block at a time and keeps keys and values. In training the blocks of a clip are rows of one batch:
each row has its own noise level, and looks at the sink, at the rows of the blocks before it within the window, and at
itself. No score is computed that a stream would not compute.

Shapes: B clips, N blocks per clip, F frames in all, L tokens per block, T text tokens, C channels, h heads of width d.
"""

from __future__ import annotations

from functools import partial

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from patchpar.models.streaming.causal.audio_conditioner import AudioConditioner
from patchpar.models.streaming.causal.rope import PatchGrid, Rotary, RotaryPositions
from patchpar.models.streaming.config import CausalOptions
from training.attention import attend
from training.face_data import AUDIO, PROMPTS, WIDTH, Batch

SIDE = 96
"""Pixels per side of a packaged model's frames."""
PATCH = 4
"""Latent cells per token and side: a frame is 6x6 tokens. Finer ones cost too much where there is no GPU."""
TEXT_TOKENS, TEXT_WIDTH = 16, 64
OPTIONS = CausalOptions(frames=3, window=3, sink_distance=8)
TRANSFORMER_CONFIG = {
    "patch_size": (1, PATCH, PATCH),
    "num_attention_heads": AUDIO.heads,
    "attention_head_dim": WIDTH // AUDIO.heads,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 128,
    "ffn_dim": 3 * WIDTH,
    "num_layers": 4,
    "cross_attn_norm": True,
    "rope_max_seq_len": 64,
}
_TEXT_CONFIG = {
    "d_model": TEXT_WIDTH,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 1,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def build_face_tokenizer() -> T5Tokenizer:
    """One token per word of the prompts; other words fall apart into letters that mean nothing."""
    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    letters = [(chr(code), -9.0) for code in range(33, 127)]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -9.0)]
    vocab = special + letters + [("\u2581" + word, -1.0) for word in words if len(word) > 1]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=TEXT_TOKENS)


class FaceNetworks(nn.Module):
    """Transformer, its ears and its text encoder; all three are trained."""

    def __init__(self) -> None:
        super().__init__()
        tokenizer = build_face_tokenizer()
        self.transformer = WanTransformer3DModel(**TRANSFORMER_CONFIG)
        self.audio = AudioConditioner(AUDIO)
        self.text_encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **_TEXT_CONFIG))
        options = {"padding": "max_length", "max_length": TEXT_TOKENS, "return_tensors": "pt"}
        tokens = tokenizer(list(PROMPTS), **options)
        self.register_buffer("prompt_ids", tokens.input_ids, persistent=False)
        self.register_buffer("prompt_mask", tokens.attention_mask, persistent=False)

    def prompts(self) -> Tensor:
        """Embeddings (prompts, T, width) of PROMPTS, as WanPipeline makes them: zeros behind the last token."""
        embedded = self.text_encoder(self.prompt_ids, self.prompt_mask).last_hidden_state
        return embedded * self.prompt_mask[..., None]


class ClipTraining:
    """Forward passes over whole clips. Until `remove`, the networks serve nothing else."""

    def __init__(self, networks: FaceNetworks, options: CausalOptions = OPTIONS) -> None:
        self.networks, self.options = networks, options
        self.state = _Course(options)
        self._heard: Tensor | None = None
        self._plain, self._hooks = networks.transformer.attn_processors, []
        for layer, block in enumerate(networks.transformer.blocks):
            block.attn1.processor = _ClipAttention(layer, self.state)
            block.attn2.processor = _TextAttention()
            if layer in networks.audio.config.after:
                self._hooks.append(block.register_forward_hook(partial(self._listen, layer)))

    def remove(self) -> None:
        """The networks are as they were."""
        self.networks.transformer.set_attn_processor(self._plain)
        for hook in self._hooks:
            hook.remove()

    def velocity(self, noisy_BCFHW: Tensor, batch: Batch) -> Tensor:
        """The flow (B, 4, F, H, W) from image to noise, at the batch's noise levels and under its conditions."""
        frames, blocks = self.options.frames, batch.level.shape[1]
        prompts = self.networks.prompts()
        self.state.begin_sink(noisy_BCFHW)
        clean = batch.reference.new_zeros(len(batch.reference))
        self._forward(batch.reference, clean, prompts[batch.sink_mood])
        self.state.begin_blocks(blocks)
        self._heard = self.networks.audio.encode(batch.audio.unflatten(1, (blocks, frames)).flatten(0, 1))
        rows = noisy_BCFHW.unflatten(2, (blocks, frames)).transpose(1, 2).flatten(0, 1)
        flow = self._forward(rows, 1000 * batch.level.flatten(), prompts[batch.moods].flatten(0, 1))
        self._heard = None
        return flow.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)

    def _listen(self, layer: int, _: nn.Module, __: tuple, hidden_BLD: Tensor) -> Tensor | None:
        """A forward hook: the sink hears nothing."""
        return None if self._heard is None else hidden_BLD + self.networks.audio(layer, hidden_BLD, self._heard)

    def _forward(self, rows: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        return self.networks.transformer(rows, timestep, text, return_dict=False)[0]


class _Course:
    """Which pass it is, where its tokens are, and the sink's keys (not rotated) and values by layer."""

    def __init__(self, options: CausalOptions) -> None:
        self.options = options
        self.blocks = 0
        self.sinks: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: Rotary
        self.sink: list[Rotary]
        self._positions: RotaryPositions

    def begin_sink(self, latents_BCFHW: Tensor) -> None:
        """A frame by itself."""
        head, side = TRANSFORMER_CONFIG["attention_head_dim"], latents_BCFHW.shape[-1] // PATCH
        space = 2 * (head // 6)
        grid = PatchGrid(rows=side, columns=side)
        self._positions = RotaryPositions((head - 2 * space, space, space), grid, latents_BCFHW.device)
        self.blocks, self.own = 0, self._at([0])
        self.sinks.clear()

    def begin_blocks(self, blocks: int) -> None:
        """All blocks of a clip."""
        frames, distance = self.options.frames, self.options.sink_distance
        whole = self._at(list(range(blocks * frames)))
        cos, sin = (table.unflatten(1, (blocks, -1)) for table in whole)
        self.blocks, self.own = blocks, (cos, sin)
        self.sink = [self._at([block * frames + distance]) for block in range(blocks)]

    def _at(self, frames: list[int]) -> Rotary:
        """(1, tokens, 1, d) in single precision; the signs of the turn are in the sines."""
        cos, sin = (table.float() for table in self._positions.at(frames))
        return cos, sin * torch.tensor([-1.0, 1.0], device=sin.device).repeat(sin.shape[-1] // 2)


def _turned(x: Tensor, rotary: Rotary) -> Tensor:
    """`patchpar.models.streaming.causal.rope.rotate` in the precision of x, which takes half the time."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    return x * cos + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin


class _ClipAttention:
    """Self-attention (a diffusers processor): the sink by itself, or all blocks of clips, (B * N, L, C)."""

    def __init__(self, layer: int, state: _Course) -> None:
        self._layer, self._course = layer, state

    def __call__(self, attn: nn.Module, hidden_states: Tensor, *_: object) -> Tensor:
        state = self._course
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k, v = (x.to(v.dtype).unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(q), attn.norm_k(k), v))
        if state.blocks:
            q, k, v = (x.unflatten(0, (-1, state.blocks)) for x in (q, k, v))
            seen = self._blocks(_turned(q, state.own), _turned(k, state.own), v)
        else:
            state.sinks[self._layer] = (k, v)
            seen = _attend(_turned(q, state.own), _turned(k, state.own), v)
        return attn.to_out[0](seen.flatten(2))

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries, keys, values (B, N, L, h, d) to what each block sees, (B * N, L, h, d)."""
        state = self._course
        sink_k, sink_v = state.sinks[self._layer]
        rows = []
        for block, position in enumerate(state.sink):
            window = slice(max(0, block + 1 - state.options.window), block + 1)
            keys = torch.cat([_turned(sink_k, position), k[:, window].flatten(1, 2)], 1)
            values = torch.cat([sink_v, v[:, window].flatten(1, 2)], 1)
            rows.append(_attend(q[:, block], keys, values))
        return torch.stack(rows, 1).flatten(0, 1)


class _TextAttention:
    """Cross-attention (a diffusers processor) to a few tokens, by plain matrix products."""

    def __call__(self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor, *_: object) -> Tensor:
        q, k, v = attn.to_q(hidden_states), attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states)
        q, k, v = (x.to(v.dtype).unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(q), attn.norm_k(k), v))
        return attn.to_out[0](_attend(q, k, v).flatten(2))


def _attend(q_BLhd: Tensor, k_BLhd: Tensor, v_BLhd: Tensor) -> Tensor:
    return attend(*(x.transpose(1, 2) for x in (q_BLhd, k_BLhd, v_BLhd))).transpose(1, 2)
