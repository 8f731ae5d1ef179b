"""Group norm of the whole image over a band of rows, and the activation after it.

Moments go to all ranks and raw edge rows to the neighbours in one round. The receiver normalises the rows once the
moments have arrived, so that the next convolution needs no exchange.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.comm.exchange_part import Halo
from patchpar.shard.unet.layers import Moments, Normalise, merge_moments, moments_of, pack_moments
from patchpar.shard.vae.band import NeighbourRows, VaeBand, moved

SLICES = 8  # of the channels, one at a time in fp32: all at once would need several times the peak of half precision
INPLACE = (F.silu, F.relu)
POINTWISE = (*INPLACE, F.gelu, F.mish, F.dropout, torch.tanh)


@dataclass(frozen=True, slots=True)
class GroupNormArguments:
    """The arguments of a group norm, by the names of the module."""

    num_groups: int
    num_channels: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def slices(self, dtype: torch.dtype) -> Iterator[tuple[slice, slice, "GroupNormArguments"]]:
        """Yield (groups, channels, norm of these alone), small enough to hold in fp32."""
        step = self.num_groups if dtype == torch.float32 else -(-self.num_groups // SLICES)
        width = self.num_channels // self.num_groups
        for first in range(0, self.num_groups, step):
            groups = slice(first, min(first + step, self.num_groups))
            channels = slice(groups.start * width, groups.stop * width)
            weight, bias = (None if x is None else x[channels] for x in (self.weight, self.bias))
            count = groups.stop - groups.start
            yield groups, channels, GroupNormArguments(count, count * width, weight, bias, self.eps)


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
    own = pack_moments(_moments(norm, input))
    sends_edges = input.ndim >= 4 and band.feeds.get(band.where, True)
    received, halo = band.start([own], band.patch.edges(input, 1, 1) if sends_edges else None)()
    everyone = [
        received[group_rank][0] if group_rank in received else own for group_rank in range(len(band.patch.bands))
    ]
    moments = merge_moments(everyone if received else [own], (input.shape[0], num_groups))
    y = _normalised(norm, moments, input)
    if sends_edges:
        rows = Halo(*(None if x is None else _normalised(norm, moments, x) for x in halo))
        band.leave(NeighbourRows(weakref.ref(y), lambda: rows, norm=band.where))
    return y


def _moments(norm: GroupNormArguments, x: Tensor) -> Moments:
    found = [moments_of(x[:, channels], part.num_groups) for _, channels, part in norm.slices(x.dtype)]
    num, means, m2s = zip(*found, strict=True)
    return Moments(num[0], torch.cat(means, 1), torch.cat(m2s, 1))


def _normalised(norm: GroupNormArguments, moments: Moments, x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return Normalise(norm, moments)(x)
    y = torch.empty_like(x)
    for groups, channels, part in norm.slices(x.dtype):
        own = Moments(moments.num, moments.mean_BG[:, groups], moments.m2_BG[:, groups])
        y[:, channels] = Normalise(part, own)(x[:, channels])
    return y


def pointwise(band: VaeBand, function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply an activation to our rows, input [B, C, ..., h, W], and to those beyond.

    After a group norm it is in place where torch allows, since the norm's output is not read again.
    """
    beyond = band.beyond(input)
    if beyond is None or any(beyond.padded):
        return function(input, *args, **kwargs)
    y = function(input, inplace=True) if function in INPLACE else function(input, *args, **kwargs)
    band.leave(moved(beyond, y, lambda rows: function(rows, *args, **kwargs)))
    return y
