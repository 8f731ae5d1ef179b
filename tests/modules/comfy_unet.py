"""The structure of ComfyUI's own UNetModel as SDXL has it: lists of layers, attention without a processor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.modules.comfy_attention import Executor, optimized_attention, timestep_embedding

CHANNELS, HEADS, TEXT = 8, 2, 12
EMBEDDING = 4 * CHANNELS


def group_norm(channels: int, eps: float = 1e-5) -> nn.GroupNorm:
    return nn.GroupNorm(4, channels, eps=eps)


class CrossAttention(nn.Module):
    def __init__(self, dim: int, context_dim: int | None = None) -> None:
        super().__init__()
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k, self.to_v = (nn.Linear(context_dim or dim, dim, bias=False) for _ in range(2))
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value: Any = None,
        mask: Any = None,
        transformer_options: Any = None,
    ) -> Tensor:
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        return self.to_out(optimized_attention(q, k, v, HEADS, mask, transformer_options=transformer_options))


class GEGLU(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, 2 * inner)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(GEGLU(dim, 2 * dim), nn.Dropout(0.0), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attn1, self.attn2, self.ff = CrossAttention(dim), CrossAttention(dim, TEXT), FeedForward(dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        n = self.norm1(x)
        x = x + self.attn1(n, context=None, value=None, transformer_options=transformer_options)
        x = x + self.attn2(self.norm2(x), context=context, transformer_options=transformer_options)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nn.Module):
    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.norm = group_norm(channels, 1e-6)
        self.proj_in, self.proj_out = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.transformer_blocks = nn.ModuleList(BasicTransformerBlock(channels) for _ in range(depth))

    def forward(self, x: Tensor, context: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        b, c, h, w = x.shape
        kept, x = x, self.norm(x)
        x = self.proj_in(x.movedim(1, 3).flatten(1, 2).contiguous())
        for number, block in enumerate(self.transformer_blocks):
            transformer_options["block_index"] = number
            x = block(x, context, transformer_options)
        x = self.proj_out(x)
        return x.reshape(b, h, w, c).movedim(3, 1).contiguous() + kept


class ResBlock(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(group_norm(channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(EMBEDDING, out))
        self.out_layers = nn.Sequential(group_norm(out), nn.SiLU(), nn.Dropout(0.0), nn.Conv2d(out, out, 3, padding=1))
        self.skip_connection = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers(x)
        h = h + self.emb_layers(emb)[:, :, None, None]
        return self.skip_connection(x) + self.out_layers(h)


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, output_shape: Any = None) -> Tensor:
        shape = [2 * x.shape[2], 2 * x.shape[3]] if output_shape is None else list(output_shape[2:])
        return self.conv(F.interpolate(x, size=shape, mode="nearest"))


class TimestepEmbedSequential(nn.Sequential):
    """Never called itself: the network passes each layer what its class takes."""


def run_layers(
    layers: nn.Module, x: Tensor, emb: Tensor, context: Tensor, options: dict[str, Any], output_shape: Any = None
) -> Tensor:
    for layer in layers.children():
        if isinstance(layer, ResBlock):
            x = layer(x, emb)
        elif isinstance(layer, SpatialTransformer):
            x = layer(x, context, options)
        elif isinstance(layer, Upsample):
            x = layer(x, output_shape=output_shape)
        else:
            x = layer(x)
    return x


class UNetModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide, many = CHANNELS, 2 * CHANNELS
        self.time_embed, self.label_emb = (
            nn.Sequential(nn.Linear(size, EMBEDDING), nn.SiLU(), nn.Linear(EMBEDDING, EMBEDDING))
            for size in (CHANNELS, 8)
        )
        each = TimestepEmbedSequential
        self.input_blocks = nn.ModuleList(
            [
                each(nn.Conv2d(4, wide, 3, padding=1)),
                each(ResBlock(wide, wide)),
                each(Downsample(wide)),
                each(ResBlock(wide, many), SpatialTransformer(many, 1)),
            ]
        )
        self.middle_block = each(ResBlock(many, many), SpatialTransformer(many, 1), ResBlock(many, many))
        self.output_blocks = nn.ModuleList(
            [
                each(ResBlock(2 * many, many), SpatialTransformer(many, 1)),
                each(ResBlock(many + wide, many), Upsample(many)),
                each(ResBlock(many + wide, wide)),
                each(ResBlock(2 * wide, wide)),
            ]
        )
        self.out = nn.Sequential(group_norm(wide), nn.SiLU(), nn.Conv2d(wide, 4, 3, padding=1))

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor | None = None,
        context: Tensor | None = None,
        y: Tensor | None = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, 4, H, W] to the same."""
        options = {} if transformer_options is None else transformer_options
        return Executor.of(self, options).execute(x, timesteps, context, y, control, options, **kwargs)

    def _forward(
        self, x: Tensor, timesteps: Tensor, context: Tensor, y: Tensor, control: Any, options: dict[str, Any]
    ) -> Tensor:
        options["original_shape"] = list(x.shape)
        emb = self.time_embed(timestep_embedding(timesteps, CHANNELS).to(x.dtype)) + self.label_emb(y)
        kept, h = [], x
        for number, layers in enumerate(self.input_blocks):
            options["block"] = ("input", number)
            h = run_layers(layers, h, emb, context, options)
            kept.append(h)
        options["block"] = ("middle", 0)
        h = run_layers(self.middle_block, h, emb, context, options)
        for number, layers in enumerate(self.output_blocks):
            options["block"] = ("output", number)
            h = torch.cat([h, kept.pop()], dim=1)
            h = run_layers(layers, h, emb, context, options, kept[-1].shape if kept else None)
        return self.out(h.to(x.dtype))
