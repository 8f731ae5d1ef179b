"""Convolution and group norm over a band of rows, independent of steps and ranks.

Shape letters: B batch, C channels, H rows of the whole, h rows of this rank's band, W columns, G groups, P ranks. A map
is [B, C, h, W], or [B, C, F, h, W] with frames. `dim` is the split dim, counted from the end; "rows" below means slices
along it, so columns work alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.comm.exchange_part import Halo
from patchpar.comm.kernels.fused_op import is_fused
from patchpar.plan.bands import Stencil
from patchpar.shard.kernels.concat_halo import concat_halo, ready_rows
from patchpar.shard.kernels.group_norm import normalise_groups
from patchpar.shard.kernels.map_layout import dense
from patchpar.shard.unet.one_column import convolve_strided

Conv = nn.Conv2d | nn.Conv3d
Sizes = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class ConvolutionArguments:
    """The arguments of a convolution, by the names of the module. `bias`: [out channels].

    `weight`: [out channels, in channels / groups, kernel rows, kernel columns], for videos with frames before rows.
    """

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """The kernel size of the weight."""
        return tuple(self.weight.shape[2:])

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> "ConvolutionArguments":
        """Return those of a call of F.conv2d or F.conv3d after its input. `bias` [out channels].

        `weight` [out channels, in channels / groups, kernel rows, kernel columns].
        """
        size = weight.shape[2:]
        dilations = _each(dilation, len(size))
        if padding == "same":
            padding = [spread * (extent - 1) // 2 for spread, extent in zip(dilations, size, strict=True)]
        elif isinstance(padding, str):
            padding = 0
        return cls(weight, bias, _each(stride, len(size)), _each(padding, len(size)), dilations, groups)


def _each(sizes: Sizes, count: int) -> tuple[int, ...]:
    if isinstance(sizes, int):
        return (sizes,) * count
    return tuple(sizes) * (count if len(sizes) == 1 else 1)


class GroupNormArguments(NamedTuple):
    """The arguments of a group norm, by the names of the module. `weight`, `bias`: [C]."""

    num_groups: int
    num_channels: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float


ConvolutionLike = Conv | ConvolutionArguments
GroupNormLike = nn.GroupNorm | GroupNormArguments
PASSING = (nn.Identity, nn.Dropout)  # what a model that is not in training passes through
VALUES_PER_WEIGHT = 8  # map values for each weight, up to which a copy costs less than a second pass over the weights
LAUNCHES_SAVED = 4  # by a copy of the band instead of a second and third convolution of its borders, or more
BYTES_PER_LAUNCH = 2**23  # that a GPU copies while its host prepares a launch: about 5 us
WITHOUT_LAUNCHES = ("cpu", "meta")  # devices; the second is that of recordings, where what `is_fused` stands for a GPU


def normalise(
    norm: GroupNormLike,
    x: Tensor,
    moments: tuple[Tensor, tuple[int, ...]],
    now: Tensor | None = None,
    *,
    least: float = 0.0,
    published: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the band `x` [B, C, ...] normalised with the packed `moments` of all ranks.

    They are `MomentRows`: [P, 1 + 2 * B * G], or [elements] and where each rank's begin. Also the terms [3, B * C] of
    its channels, for a neighbour's rows. `now`, `least` and `published` are for stale moments, see
    `kernels.group_norm`.
    """
    values, starts = moments
    options = norm.num_groups, norm.eps, norm.weight, norm.bias, now, least, published, starts
    if is_fused(x):
        return normalise_groups.fused(dense(x), values, *options)
    return normalise_groups(x, values, *options)


class RawHalo(NamedTuple):
    """The neighbours' rows as the exchange of a norm brings them, and what makes a convolution's halo of them."""

    halo: Halo
    terms: Tensor  # [3, B * C], mean, scale and shift of each channel in that norm
    dim: int
    activations: tuple[nn.Module, ...] = ()

    def ready(self) -> Halo:
        """Return the rows normalised and activated."""
        silu = self.activates_by_silu
        halo = Halo(*ready_rows(*self.halo, self.dim, self.terms, silu=bool(silu)))
        return halo if silu is not None else Halo(*(None if rows is None else self._activated(rows) for rows in halo))

    @property
    def activates_by_silu(self) -> bool | None:
        """Whether the rows are only activated by SiLU; False where they are not activated; None for anything else."""
        silu = False
        for each in self.activations:
            if isinstance(each, PASSING) and not each.training:
                continue
            if silu or not isinstance(each, nn.SiLU):
                return None
            silu = True
        return silu

    def _activated(self, rows: Tensor) -> Tensor:
        for activation in self.activations:
            rows = activation(rows)
        return rows


def stencil_of(conv: ConvolutionLike, dim: int) -> Stencil:
    """Return the stencil of `conv` along `dim` (counted from the end)."""
    return Stencil(
        extent=conv.dilation[dim] * (conv.kernel_size[dim] - 1) + 1,
        stride=conv.stride[dim],
        padding=int(conv.padding[dim]),
    )


def convolve(conv: ConvolutionLike, x: Tensor, dim: int) -> Tensor:
    """Apply `conv` without its padding along `dim` to `x` [B, C, ..., h, W], which has the rows outside already.

    Weights stored in a smaller dtype (layerwise casting) are cast to that of `x`.
    """
    padding: list[Any] = list(conv.padding)
    padding[dim] = 0
    weight, bias, dtype = conv.weight, conv.bias, x.dtype  # of a module each name costs a call
    function: Callable[..., Tensor] = F.conv2d if weight.ndim == 4 else F.conv3d
    if weight.dtype != dtype:
        weight = weight.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    sizes = conv.stride, tuple(padding), conv.dilation
    if conv.stride[-1] > 1 and x.device.type == "cpu":
        return convolve_strided(function, x, weight, bias, sizes, conv.groups)
    return function(x, weight, bias, *sizes, conv.groups)


def mend_borders(conv: ConvolutionLike, x: Tensor, y: Tensor, dim: int, stencil: Stencil, halo: Halo) -> Tensor:
    """Recompute in place the rows of `y` = conv(x, zero padded) that read the halo; all are [B, C, ..., h, W].

    Only the few border rows are computed twice, so the bulk can be convolved during the exchange, and there is no
    padded copy of `x`.
    """
    size = x.shape[dim]
    top, bottom = stencil.outputs_before(), stencil.outputs_after()
    if halo.before is not None and top:
        reach = (top - 1) * stencil.stride + stencil.extent - stencil.padding
        rows = torch.cat([halo.before, x.narrow(dim, 0, reach)], dim)
        y.narrow(dim, 0, top).copy_(convolve(conv, rows, dim))
    if halo.after is not None and bottom:
        start = (y.shape[dim] - bottom) * stencil.stride - stencil.padding
        rows = torch.cat([x.narrow(dim, start, size - start), halo.after], dim)
        y.narrow(dim, y.shape[dim] - bottom, bottom).copy_(convolve(conv, rows, dim))
    return y


def is_thin(size: int, stencil: Stencil) -> bool:
    """Whether a band is too thin for `mend_borders`: all its rows read rows of a neighbour."""
    return size < 2 * stencil.extent


def copies_band(conv: ConvolutionLike, x: Tensor, *, has_halo: bool) -> bool:
    """Whether `convolve_with_halo` is faster for the band `x` [B, C, ..., h, W] than `mend_borders`.

    Mending convolves the borders again and overlaps the bulk with the exchange; on a GPU its launches cost more than a
    copy of a small map. On a CPU, also of a recording without values, that depends on the weights, and on whether the
    exchange is over.
    """
    if is_fused(x) or x.device.type not in WITHOUT_LAUNCHES:
        return x.numel() * x.element_size() <= LAUNCHES_SAVED * BYTES_PER_LAUNCH
    return has_halo and is_heavy(conv, x)


def is_heavy(conv: ConvolutionLike, x: Tensor) -> bool:
    """Whether `x` [B, C, ..., h, W] is small beside the weights, so that `convolve_with_halo` after the halo is faster.

    A kernel reads its weights once per call, however few the rows, and some kernels copy them into another order first.
    """
    return x.numel() <= VALUES_PER_WEIGHT * conv.weight.numel()


def convolve_with_halo(conv: ConvolutionLike, x: Tensor, dim: int, stencil: Stencil, halo: Halo | RawHalo) -> Tensor:
    """Convolve the band `x` [B, C, ..., h, W] with its halo concatenated, zeros at the edges of the image.

    For thin bands, large weights, and GPUs, where the copy also normalises and activates a raw halo.
    """
    return convolve(conv, join_halo(x, dim, stencil, halo)[0], dim)


def join_halo(
    x: Tensor, dim: int, stencil: Stencil, halo: Halo | RawHalo, first: int = 0, last: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the band `x` [B, C, ..., h, W] with its halo, as a convolution with `stencil` reads it.

    Also contiguous copies of the `first` and of the `last` rows of `x`.
    """
    (before, after), terms, silu = _unpacked(halo)
    rows_before = stencil.before if before is None else before.shape[dim]
    rows_after = _rows_needed(stencil, x.shape[dim]) if after is None else after.shape[dim]
    if not is_fused(x):
        return concat_halo(x, before, after, rows_before, rows_after, dim, terms, silu, first, last)
    before, after = before if before is None else before.contiguous(), after if after is None else after.contiguous()
    return concat_halo.fused(dense(x), before, after, rows_before, rows_after, dim, terms, silu, first, last)


def _rows_needed(stencil: Stencil, size: int) -> int:
    """Return how many rows after `size` of them a convolution reads."""
    outputs = -(-size // stencil.stride)
    return max(0, (outputs - 1) * stencil.stride + stencil.extent - stencil.padding - size)


def _unpacked(halo: Halo | RawHalo) -> tuple[Halo, Tensor | None, bool]:
    """Return rows, and what is left to do with them: terms [3, B * C] of a norm, if any, and whether SiLU."""
    if isinstance(halo, Halo):
        return halo, None, False
    silu = halo.activates_by_silu
    return (halo.ready(), None, False) if silu is None else (halo.halo, halo.terms, silu)
