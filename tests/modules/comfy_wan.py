"""The structure of ComfyUI's own Wan: a patch embedding by a 3D convolution, separate self- and cross-attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.modules.comfy_attention import EmbedND, Executor, apply_rope, optimized_attention, timestep_embedding

HEADS, DIM = 2, 24


class WanSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor, freqs: Tensor, transformer_options: Any = None) -> Tensor:
        b, s = x.shape[:2]
        q = apply_rope(self.norm_q(self.q(x)).view(b, s, HEADS, -1), freqs)
        k = apply_rope(self.norm_k(self.k(x)).view(b, s, HEADS, -1), freqs)
        v = self.v(x).view(b, s, DIM)
        options = {"transformer_options": transformer_options}
        return self.o(optimized_attention(q.view(b, s, DIM), k.view(b, s, DIM), v, heads=HEADS, **options))


class WanT2VCrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor, context: Tensor, transformer_options: Any = None) -> Tensor:
        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(context)), self.v(context)
        return self.o(optimized_attention(q, k, v, heads=HEADS, transformer_options=transformer_options))


def repeat_e(e: Tensor, x: Tensor) -> Tensor:
    """Modulations of one or several steps, for all tokens."""
    repeats = 1 if e.size(1) <= 1 else x.size(1) // e.size(1)
    return e if repeats == 1 else torch.repeat_interleave(e, repeats, dim=1)


class WanAttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.norm3 = nn.LayerNorm(DIM, eps=1e-6)
        self.self_attn, self.cross_attn = WanSelfAttention(), WanT2VCrossAttention()
        self.ffn = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(approximate="tanh"), nn.Linear(2 * DIM, DIM))
        self.modulation = nn.Parameter(torch.randn(1, 6, DIM) / DIM**0.5)

    def forward(self, x: Tensor, e: Tensor, freqs: Tensor, context: Tensor, transformer_options: Any = None) -> Tensor:
        e0, e1, e2, e3, e4, e5 = (self.modulation.unsqueeze(0) + e).unbind(2)
        y = self.self_attn(
            torch.addcmul(repeat_e(e0, x), self.norm1(x), 1 + repeat_e(e1, x)),
            freqs,
            transformer_options=transformer_options,
        )
        x = torch.addcmul(x, y, repeat_e(e2, x))
        x = x + self.cross_attn(self.norm3(x), context, transformer_options=transformer_options)
        y = self.ffn(torch.addcmul(repeat_e(e3, x), self.norm2(x), 1 + repeat_e(e4, x)))
        return torch.addcmul(x, y, repeat_e(e5, x))


class WanModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_size, self.out_dim = (1, 2, 2), 4
        self.patch_embedding = nn.Conv3d(4, DIM, kernel_size=self.patch_size, stride=self.patch_size)
        self.text_embedding = nn.Sequential(nn.Linear(12, DIM), nn.GELU(approximate="tanh"), nn.Linear(DIM, DIM))
        self.time_embedding = nn.Sequential(nn.Linear(16, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))
        self.blocks = nn.ModuleList(WanAttentionBlock() for _ in range(2))
        self.head_norm, self.head = nn.LayerNorm(DIM, elementwise_affine=False), nn.Linear(DIM, 16)
        self.head_modulation = nn.Parameter(torch.randn(1, 2, DIM) / DIM**0.5)
        self.rope_embedder = EmbedND((4, 4, 4))

    def forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, transformer_options: Any = None, **kwargs: Any
    ) -> Tensor:
        """[B, 4, F, H, W] to the same."""
        options = {} if transformer_options is None else transformer_options
        return Executor.of(self, options).execute(x, timestep, context, options, **kwargs)

    def _forward(self, x: Tensor, timestep: Tensor, context: Tensor, options: dict[str, Any]) -> Tensor:
        frames, height, width = x.shape[-3:]
        x = F.pad(x, (0, width % 2, 0, height % 2, 0, 0), mode="circular")
        sizes = frames, x.shape[-2] // 2, x.shape[-1] // 2
        ids = torch.zeros(*sizes, 3)
        for axis, size in enumerate(sizes):
            shape = [1, 1, 1]
            shape[axis] = size
            ids[..., axis] = ids[..., axis] + torch.linspace(0, size - 1, steps=size).view(shape)
        freqs = self.rope_embedder(ids.reshape(1, -1, 3)).movedim(1, 2)
        return self.forward_orig(x, timestep, context, freqs, options)[:, :, :frames, :height, :width]

    def forward_orig(self, x: Tensor, t: Tensor, context: Tensor, freqs: Tensor, options: dict[str, Any]) -> Tensor:
        x = self.patch_embedding(x.float()).to(x.dtype)
        sizes = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        e = self.time_embedding(timestep_embedding(t.flatten(), 16)).reshape(t.shape[0], -1, DIM)
        e0 = self.time_projection(e).unflatten(2, (6, DIM))
        context = self.text_embedding(context)
        for number, block in enumerate(self.blocks):
            options["block_index"] = number
            x = block(x, e=e0, freqs=freqs, context=context, transformer_options=options)
        shift, scale = (self.head_modulation.unsqueeze(0) + e.unsqueeze(2)).unbind(2)
        x = self.head(torch.addcmul(repeat_e(shift, x), self.head_norm(x), 1 + repeat_e(scale, x)))
        x = x.view(x.shape[0], *sizes, *self.patch_size, self.out_dim)
        x = torch.einsum("bfhwpqrc->bcfphqwr", x)
        return x.reshape(x.shape[0], self.out_dim, *(i * j for i, j in zip(sizes, self.patch_size, strict=True)))
