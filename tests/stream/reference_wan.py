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

    def rotated(self, x: Tensor, frames: Sequence[int], rows: int, columns: int) -> Tensor:
        """Rotate [F h w, heads, d] as complex numbers, by time, row and column."""
        width = x.shape[-1]
        third = 2 * (width // 6)
        parts = []
        axes = torch.meshgrid(torch.tensor(list(frames)), torch.arange(rows), torch.arange(columns), indexing="ij")
        for size, position in zip((width - 2 * third, third, third), axes, strict=True):
            speeds = 1.0 / 10000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
            parts.append(position.flatten().double()[:, None] * speeds)
        turn = torch.polar(torch.ones(()).double(), torch.cat(parts, 1))[:, None]
        turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.view_as_real(turned).flatten(-2).float()

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    @torch.no_grad()
    def __call__(
        self, x_CFHW: Tensor, t: float, text_TD: Tensor, frames: Sequence[int], seen: Sequence[Seen] = ()
    ) -> tuple[Tensor, KV]:
        """The velocity of a block whose frames are at times `frames`, and its keys and values."""
        weight, bias = self.weights["patch_embedding.weight"], self.weights["patch_embedding.bias"]
        patches = functional.conv3d(x_CFHW[None], weight, bias, stride=weight.shape[2:])[0]
        _, count, rows, columns = patches.shape
        x = patches.flatten(1).T
        e, e6 = self.timestep(t)
        text = self.linear("text_embedding.0", text_TD)
        text = self.linear("text_embedding.2", functional.gelu(text, approximate="tanh"))
        own: KV = []
        for layer in range(self.layers):
            name = f"blocks.{layer}"
            shift, scale, gate, shift2, scale2, gate2 = self.weights[f"{name}.modulation"][0] + e6
            h = functional.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift
            q, k, v = (self.linear(f"{name}.self_attn.{each}", h) for each in "qkv")
            q, k = self.rms(f"{name}.self_attn.norm_q", q), self.rms(f"{name}.self_attn.norm_k", k)
            q, k, v = (y.unflatten(1, (self.heads, -1)) for y in (q, k, v))
            own.append((k, v))
            blocks = [*((each.kv[layer], each.frames) for each in seen), ((k, v), frames)]
            keys = torch.cat([self.rotated(key, at, rows, columns) for (key, _), at in blocks])
            values = torch.cat([value for (_, value), _ in blocks])
            y = self.attended(self.rotated(q, frames, rows, columns), keys, values)
            x = x + self.linear(f"{name}.self_attn.o", y) * gate
            norm = self.weights[f"{name}.norm3.weight"], self.weights[f"{name}.norm3.bias"]
            h = functional.layer_norm(x, x.shape[-1:], *norm, eps=EPS)
            q = self.rms(f"{name}.cross_attn.norm_q", self.linear(f"{name}.cross_attn.q", h))
            k = self.rms(f"{name}.cross_attn.norm_k", self.linear(f"{name}.cross_attn.k", text))
            v = self.linear(f"{name}.cross_attn.v", text)
            y = self.attended(*(z.unflatten(1, (self.heads, -1)) for z in (q, k, v)))
            x = x + self.linear(f"{name}.cross_attn.o", y)
            h = functional.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale2) + shift2
            h = functional.gelu(self.linear(f"{name}.ffn.0", h), approximate="tanh")
            x = x + self.linear(f"{name}.ffn.2", h) * gate2
        shift, scale = self.weights["head.modulation"][0] + e
        h = functional.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift
        out = self.linear("head.head", h).view(count, rows, columns, 1, *weight.shape[3:], -1)
        return torch.einsum("fhwpqrc->cfphqwr", out).flatten(1, 2).flatten(2, 3).flatten(3, 4), own
