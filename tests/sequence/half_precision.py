"""Attention in half precision, at once and in parts of the keys, beside fp64: on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from patchpar.shard.attention.partial import attend_locally, merge_partials
from tests.tensors import relative

WIDTHS = (40, 64, 72, 80, 88, 128, 160)
"""Of heads: Stable Diffusion 1.5 has 40, 80 and 160, SDXL 64, PixArt 72, HunyuanDiT 88, FLUX 128."""
PARTS = (100, 37, 163)


class AttentionErrors(NamedTuple):
    """Relative errors against fp64: of one kernel for all keys, of parts merged, and of parts without what counts."""

    whole: float
    parts: float
    without: float


def errors_of_attention(device: torch.device, dtype: torch.dtype, width: int, *, masked: bool) -> AttentionErrors:
    """Of heads of this width; a mask hides a fifth of the keys, other ones for each sample, and one part from one."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(PARTS)
    q, k, v = (torch.randn(2, 3, tokens, width, generator=generator).to(device, dtype) for _ in range(3))
    bias = None
    if masked:
        hidden = torch.rand(2, 1, 1, tokens, generator=generator) < 0.2
        hidden[1, ..., : PARTS[0]] = True
        bias = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).to(device, dtype)
    wide = None if bias is None else bias.double()
    truth = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=wide)
    whole = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    columns = [None] * len(PARTS) if bias is None else bias.split(PARTS, -1)
    pieces = list(zip(k.split(PARTS, 2), v.split(PARTS, 2), columns, strict=True))
    parts = merge_partials(attend_locally(q, *piece[:2], bias=piece[2]) for piece in pieces)
    without = merge_partials(attend_locally(q, *piece[:2]) for piece in (pieces if masked else pieces[1:]))
    found = (whole, parts.out_BNlD, without.out_BNlD)
    return AttentionErrors(*(relative(each.double(), truth) for each in found))
