"""What ComfyUI's networks have in common: rotary positions, attention by name, wrappers around the forward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    frequencies = torch.exp(
        -math.log(10000) * torch.arange(dim // 2, dtype=torch.float32, device=t.device) / (dim // 2)
    )
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rope(positions: Tensor, dim: int) -> Tensor:
    """[B, L] to [B, L, dim / 2, 2, 2]."""
    omega = 1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    out = torch.einsum("...n,d->...nd", positions.double(), omega)
    out = torch.stack([out.cos(), -out.sin(), out.sin(), out.cos()], dim=-1)
    return out.unflatten(-1, (2, 2)).float()


class EmbedND(nn.Module):
    """Rotary positions of several axes."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, ids: Tensor) -> Tensor:
        found = torch.cat([rope(ids[..., number], dim) for number, dim in enumerate(self.axes)], dim=-3)
        return found.unsqueeze(1)


def apply_rope(x: Tensor, pe: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    return (pe[..., 0] * pairs[..., 0] + pe[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)


def optimized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    skip_reshape: bool = False,
    transformer_options: Any = None,
) -> Tensor:
    """[B, L, heads * D], or [B, heads, L, D] with `skip_reshape`, to [B, L, heads * D]."""
    options = transformer_options or {}
    if "optimized_attention_override" in options:
        override = options["optimized_attention_override"]
        return override(attention_pytorch, q, k, v, heads, mask=mask, skip_reshape=skip_reshape)
    return attention_pytorch(q, k, v, heads, mask, skip_reshape)


def attention_pytorch(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, skip_reshape: bool = False
) -> Tensor:
    if not skip_reshape:
        q, k, v = (x.view(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)
    return out.transpose(1, 2).reshape(out.shape[0], -1, heads * out.shape[-1])


class Executor:
    """Calls the wrappers in `transformer_options`, the last one innermost, and then the network's own `_forward`."""

    def __init__(self, own: Any, network: Any, wrappers: list[Any], idx: int = 0) -> None:
        self.own, self.class_obj, self.wrappers, self.idx = own, network, wrappers, idx

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Executor(self.own, self.class_obj, self.wrappers, self.idx + 1).execute(*args, **kwargs)

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        if self.idx < len(self.wrappers):
            return self.wrappers[self.idx](self, *args, **kwargs)
        return self.own(*args, **kwargs)

    @classmethod
    def of(cls, network: Any, transformer_options: dict[str, Any]) -> Executor:
        found = transformer_options.get("wrappers", {}).get("diffusion_model", {})
        return cls(network._forward, network, [each for wrappers in found.values() for each in wrappers])
