"""The structure of ComfyUI's own Lumina 2 and Z-Image: refiners of text and image alone, then blocks of both together.

Text and image are padded with learnt tokens to a multiple, as Z-Image does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.modules.comfy_attention import EmbedND, Executor, apply_rope, optimized_attention, timestep_embedding

HEADS, KV_HEADS, HEAD, TEXT = 4, 2, 8, 12
DIM = HEADS * HEAD
PATCH, MULTIPLE = 2, 8


class JointAttention(nn.Module):
    """With fewer heads of keys and values than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x: Tensor, x_mask: Any, freqs_cis: Tensor, transformer_options: Any) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = torch.split(self.qkv(x), [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=-1)
        q = apply_rope(self.q_norm(q.view(batch, length, HEADS, HEAD)), freqs_cis)
        k = apply_rope(self.k_norm(k.view(batch, length, KV_HEADS, HEAD)), freqs_cis)
        v = v.view(batch, length, KV_HEADS, HEAD)
        k, v = (each.unsqueeze(3).repeat(1, 1, 1, HEADS // KV_HEADS, 1).flatten(2, 3) for each in (k, v))
        q, k, v = (each.movedim(1, 2) for each in (q, k, v))
        return self.out(
            optimized_attention(q, k, v, HEADS, x_mask, skip_reshape=True, transformer_options=transformer_options)
        )


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class JointTransformerBlock(nn.Module):
    def __init__(self, modulation: bool = True) -> None:
        super().__init__()
        self.attention, self.feed_forward = JointAttention(), FeedForward()
        for name in ("attention_norm1", "ffn_norm1", "attention_norm2", "ffn_norm2"):
            setattr(self, name, nn.RMSNorm(DIM, eps=1e-5))
        self.modulation = modulation
        if modulation:
            self.adaLN_modulation = nn.Sequential(nn.Linear(DIM, 4 * DIM))

    def forward(
        self, x: Tensor, x_mask: Any, freqs_cis: Tensor, t: Any = None, transformer_options: Any = None
    ) -> Tensor:
        if not self.modulation:
            x = x + self.attention_norm2(
                self.attention(self.attention_norm1(x), x_mask, freqs_cis, transformer_options)
            )
            return x + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x)))
        scale_msa, gate_msa, scale_mlp, gate_mlp = self.adaLN_modulation(t).chunk(4, dim=1)
        normed = self.attention_norm1(x) * (1 + scale_msa.unsqueeze(1))
        attended = self.attention_norm2(self.attention(normed, x_mask, freqs_cis, transformer_options))
        x = x + gate_msa.unsqueeze(1).tanh() * attended
        normed = self.ffn_norm1(x) * (1 + scale_mlp.unsqueeze(1))
        return x + gate_mlp.unsqueeze(1).tanh() * self.ffn_norm2(self.feed_forward(normed))


class FinalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(DIM, 4 * PATCH * PATCH)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.linear(self.norm_final(x) * (1 + self.adaLN_modulation(c).unsqueeze(1)))


class NextDiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_size, self.in_channels = PATCH, 4
        self.x_embedder = nn.Linear(4 * PATCH * PATCH, DIM)
        self.t_embedder = nn.Sequential(nn.Linear(32, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.cap_embedder = nn.Sequential(nn.RMSNorm(TEXT), nn.Linear(TEXT, DIM))
        self.noise_refiner = nn.ModuleList(JointTransformerBlock() for _ in range(2))
        self.context_refiner = nn.ModuleList(JointTransformerBlock(modulation=False) for _ in range(2))
        self.layers = nn.ModuleList(JointTransformerBlock() for _ in range(2))
        self.final_layer = FinalLayer()
        self.rope_embedder = EmbedND((2, 2, 4))
        self.x_pad_token, self.cap_pad_token = (nn.Parameter(torch.randn(1, DIM)) for _ in range(2))

    def unpatchify(self, x: Tensor, size: tuple[int, int], cap_size: int) -> Tensor:
        rows, columns = size[0] // PATCH, size[1] // PATCH
        own = x[:, cap_size : cap_size + rows * columns]
        return own.view(-1, rows, columns, PATCH, PATCH, 4).permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def patchify_and_embed(self, x: Tensor, cap: Tensor, t: Tensor, options: Any) -> tuple[Tensor, int, Tensor]:
        """Text and image as tokens, the number of text tokens, and the positions."""
        batch, channels, height, width = x.shape
        cap = torch.cat((cap, self.cap_pad_token[None].repeat(batch, (-cap.shape[1]) % MULTIPLE, 1)), dim=1)
        length = cap.shape[1]
        cap_ids = torch.zeros(batch, length, 3)
        cap_ids[:, :, 0] = torch.arange(length) + 1.0
        rows, columns = height // PATCH, width // PATCH
        tokens = x.view(batch, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        tokens = self.x_embedder(tokens)
        ids = torch.zeros(batch, rows * columns, 3)
        ids[:, :, 0] = length + 1
        ids[:, :, 1] = torch.arange(rows).view(-1, 1).repeat(1, columns).flatten()
        ids[:, :, 2] = torch.arange(columns).view(1, -1).repeat(rows, 1).flatten()
        extra = (-tokens.shape[1]) % MULTIPLE
        tokens = torch.cat((tokens, self.x_pad_token[None].repeat(batch, extra, 1)), dim=1)
        freqs = self.rope_embedder(torch.cat((cap_ids, F.pad(ids, (0, 0, 0, extra))), dim=1)).movedim(1, 2)
        for layer in self.context_refiner:
            cap = layer(cap, None, freqs[:, :length], transformer_options=options)
        for layer in self.noise_refiner:
            tokens = layer(tokens, None, freqs[:, length:], t, transformer_options=options)
        return torch.cat((cap, tokens), dim=1), length, freqs

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        num_tokens: int,
        attention_mask: Tensor | None = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, 4, H, W] to the same."""
        options = {} if transformer_options is None else transformer_options
        return Executor.of(self, options).execute(x, timesteps, context, num_tokens, attention_mask, options, **kwargs)

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        num_tokens: int,
        attention_mask: Tensor | None,
        transformer_options: dict[str, Any],
    ) -> Tensor:
        height, width = x.shape[-2:]
        x = F.pad(x, (0, width % PATCH, 0, height % PATCH), mode="circular")
        t = self.t_embedder(timestep_embedding(1000 * (1.0 - timesteps), 32))
        img, length, freqs = self.patchify_and_embed(x, self.cap_embedder(context), t, transformer_options)
        transformer_options["total_blocks"] = len(self.layers)
        for number, layer in enumerate(self.layers):
            transformer_options["block_index"] = number  # the caller's dict
            img = layer(img, None, freqs, t, transformer_options=transformer_options)
        return -self.unpatchify(self.final_layer(img, t), (x.shape[-2], x.shape[-1]), length)[:, :, :height, :width]
