"""The forward pass of Wan's own transformer (arXiv:2503.20314), on weights under their own names, for one block.

Written from the papers, with nothing of the package: blocks see earlier ones through keys before rotation and values,
as the caller chooses them and their positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6
KV = list[tuple[Tensor, Tensor]]
"""Keys before rotation and values of a block, [tokens, heads, width], by layer."""


@dataclass(frozen=True)
class Seen:
    """An earlier block that a block attends to, and where its frames are in time."""

    kv: KV
    frames: Sequence[int]


class ReferenceWan:
    def __init__(self, weights: Mapping[str, Tensor], heads: int, freq_dim: int = 16) -> None:
        self.weights, self.heads, self.freq_dim = weights, heads, freq_dim
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def rms(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weights[f"{name}.weight"]

    def timestep(self, t: float) -> tuple[Tensor, Tensor]:
        """(embedding [D], modulation of blocks [6, D])."""
        half = self.freq_dim // 2
        angles = t * torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
        waves = torch.cat([angles.cos(), angles.sin()])
        e = self.linear("time_embedding.2", functional.silu(self.linear("time_embedding.0", waves)))
        return e, self.linear("time_projection.1", functional.silu(e)).unflatten(0, (6, -1))

    def turn(self, width: int, times: Sequence[int], rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Complex numbers [tokens, 1, width / 2] that rotate heads at these times, rows and columns."""
        third = 2 * (width // 6)
        parts = []
        axes = torch.meshgrid(*(torch.tensor(list(each)) for each in (times, rows, columns)), indexing="ij")
        for size, position in zip((width - 2 * third, third, third), axes, strict=True):
            speeds = 1.0 / 10000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
            parts.append(position.flatten().double()[:, None] * speeds)
        return torch.polar(torch.ones(()).double(), torch.cat(parts, 1))[:, None]

    def rotated(self, x: Tensor, turn: Tensor) -> Tensor:
        """Rotate [tokens, heads, d] as complex numbers."""
        turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.view_as_real(turned).flatten(-2).float()

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    def patches(self, x_CFHW: Tensor) -> Tensor:
        """[D, F, h, w]"""
        weight, bias = self.weights["patch_embedding.weight"], self.weights["patch_embedding.bias"]
        return functional.conv3d(x_CFHW[None], weight, bias, stride=weight.shape[2:])[0]

    def text(self, text_TD: Tensor) -> Tensor:
        text = self.linear("text_embedding.0", text_TD)
        return self.linear("text_embedding.2", functional.gelu(text, approximate="tanh"))

    def layer(
        self,
        layer: int,
        x: Tensor,
        e6: Tensor,
        text: Tensor,
        turn: Tensor,
        others: Sequence[tuple[tuple[Tensor, Tensor], Tensor]],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One transformer block: its output, its keys before rotation and values. `others`: more, with their turns."""
        name = f"blocks.{layer}"
        shift, scale, gate, shift2, scale2, gate2 = self.weights[f"{name}.modulation"][0] + e6
        h = functional.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift
        q, k, v = (self.linear(f"{name}.self_attn.{each}", h) for each in "qkv")
        q, k = self.rms(f"{name}.self_attn.norm_q", q), self.rms(f"{name}.self_attn.norm_k", k)
        q, k, v = (y.unflatten(1, (self.heads, -1)) for y in (q, k, v))
        keys = torch.cat([self.rotated(key, at) for (key, _), at in (*others, ((k, v), turn))])
        values = torch.cat([*(value for (_, value), _ in others), v])
        y = self.attended(self.rotated(q, turn), keys, values)
        x = x + self.linear(f"{name}.self_attn.o", y) * gate
        norm = self.weights[f"{name}.norm3.weight"], self.weights[f"{name}.norm3.bias"]
        x = x + self.crossed(f"{name}.cross_attn", functional.layer_norm(x, x.shape[-1:], *norm, eps=EPS), text)
        h = functional.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale2) + shift2
        h = functional.gelu(self.linear(f"{name}.ffn.0", h), approximate="tanh")
        return x + self.linear(f"{name}.ffn.2", h) * gate2, (k, v)

    def crossed(self, name: str, h: Tensor, tokens: Tensor) -> Tensor:
        """Cross-attention of rows [L, D] to tokens [T, D]."""
        q = self.rms(f"{name}.norm_q", self.linear(f"{name}.q", h))
        k = self.rms(f"{name}.norm_k", self.linear(f"{name}.k", tokens))
        v = self.linear(f"{name}.v", tokens)
        return self.linear(f"{name}.o", self.attended(*(z.unflatten(1, (self.heads, -1)) for z in (q, k, v))))

    def head(self, x: Tensor, e: Tensor, grid: Sequence[int]) -> Tensor:
        """The velocity [C, F, H, W] of tokens on a grid of patches."""
        shift, scale = self.weights["head.modulation"][0] + e
        h = functional.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift
        out = self.linear("head.head", h).view(*grid, 1, *self.weights["patch_embedding.weight"].shape[3:], -1)
        return torch.einsum("fhwpqrc->cfphqwr", out).flatten(1, 2).flatten(2, 3).flatten(3, 4)

    @torch.no_grad()
    def __call__(
        self, x_CFHW: Tensor, t: float, text_TD: Tensor, frames: Sequence[int], seen: Sequence[Seen] = ()
    ) -> tuple[Tensor, KV]:
        """The velocity of a block whose frames are at times `frames`, and its keys and values."""
        patches = self.patches(x_CFHW)
        width, (_, rows, columns) = patches.shape[0] // self.heads, patches.shape[1:]
        turns = [self.turn(width, at, range(rows), range(columns)) for at in (frames, *(each.frames for each in seen))]
        x, text, (e, e6) = patches.flatten(1).T, self.text(text_TD), self.timestep(t)
        own: KV = []
        for layer in range(self.layers):
            others = [(each.kv[layer], turn) for each, turn in zip(seen, turns[1:], strict=True)]
            x, kv = self.layer(layer, x, e6, text, turns[0], others)
            own.append(kv)
        return self.head(x, e, patches.shape[1:]), own
