"""Group norm of the whole image over a band of rows, and the activation after it.

Moments go to all ranks and raw edge rows to the neighbours in one round. The receiver normalises the rows once the
moments have arrived, so that the next convolution needs no exchange.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.comm.kernels.fused_op import is_fused
from patchpar.shard.kernels.group_moments import moments_of_band
from patchpar.shard.kernels.group_norm import scaled, terms_of
from patchpar.shard.kernels.moments import merge_moments, unpack_moments
from patchpar.shard.unet.layers import GroupNormArguments, RawHalo, normalise
from patchpar.shard.vae.band import NeighbourRows, VaeBand, moved

SLICES = 8  # of the channels, one at a time in fp32: all at once would need several times the peak of half precision
INPLACE = (F.silu, F.relu)
POINTWISE = (*INPLACE, F.gelu, F.mish, F.dropout, torch.tanh)


def group_norm(
    band: VaeBand,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return F.group_norm of our rows with the moments of all ranks. Raises ExchangeError.

    input and output [B, C, ..., h, W] or [B, C, l], weight and bias [C].
    """
    norm = GroupNormArguments(num_groups, input.shape[1], weight, bias, eps)
    sends_edges = input.ndim >= 4 and band.feeds.get(band.where, True)
    own = _moments(input, num_groups)
    received, halo = band.start([own], band.patch.edges(input, 1, 1) if sends_edges else None)()
    moments = [
        received[group_rank][0] if group_rank in received else own for group_rank in range(len(band.patch.bands))
    ]
    y, terms = _normalised(norm, input, torch.stack(moments if received else [own]))
    if sends_edges:
        rows = RawHalo(halo, terms, band.dim)
        band.leave(NeighbourRows(weakref.ref(y), rows.ready, norm=band.where))
    return y


def _is_sliced(x: Tensor) -> bool:
    """Whether `x` [B, C, ...] is normalised some groups at a time, as copies in fp32."""
    return not is_fused(x) and x.dtype in (torch.float16, torch.bfloat16)


def _slices(x: Tensor, num_groups: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (groups, channels of `x` [B, C, ...] with these), few enough to be held in fp32."""
    step, width = -(-num_groups // SLICES), x.shape[1] // num_groups
    for first in range(0, num_groups, step):
        count = min(step, num_groups - first)
        yield count, x.narrow(1, first * width, count * width)


def _moments(x: Tensor, num_groups: int) -> Tensor:
    """Return the packed moments [1 + 2 * B * G] of our rows x [B, C, ..., h, W]."""
    if not _is_sliced(x):
        return moments_of_band(x, num_groups)
    found = [
        unpack_moments(moments_of_band(part, groups), (x.shape[0], groups)) for groups, part in _slices(x, num_groups)
    ]
    num, means, m2s = zip(*found, strict=True)
    return torch.cat([num[0], torch.cat(means, 1).flatten(), torch.cat(m2s, 1).flatten()])


def _normalised(norm: GroupNormArguments, x: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return our rows x [B, C, ..., h, W] normalised, and the terms [3, B * C] of their channels."""
    if not _is_sliced(x):
        return normalise(norm, x, (moments, ()))
    merged = merge_moments(moments, (x.shape[0], norm.num_groups))
    terms = terms_of(merged, norm.num_channels // norm.num_groups, norm.eps, norm.weight, norm.bias)
    y, first = torch.empty_like(x), 0
    for _, part in _slices(x, norm.num_groups):
        of_part = terms.view(3, *x.shape[:2]).narrow(2, first, part.shape[1]).reshape(3, -1)
        y.narrow(1, first, part.shape[1]).copy_(scaled(part, of_part))
        first += part.shape[1]
    return y, terms


def pointwise(band: VaeBand, function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply an activation to rows [B, C, ..., h, W] and those beyond, in place on a norm's output if torch can."""
    beyond = band.beyond(input)
    if beyond is None:
        return function(input, *args, **kwargs)
    y = function(input, inplace=True) if function in INPLACE else function(input, *args, **kwargs)
    band.leave(moved(beyond, y, lambda rows: function(rows, *args, **kwargs)))
    return y
