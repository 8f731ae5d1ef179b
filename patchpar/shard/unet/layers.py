"""Convolution and group norm over a band of rows, independent of steps and ranks.

Shape letters: B batch, C channels, H rows of the whole, h rows of this rank's band, W columns, G groups, P ranks. A map
is [B, C, h, W], or [B, C, F, h, W] with frames. `dim` is the split dim, counted from the end; "rows" below means slices
along it, so columns work alike.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.comm.exchange_part import Halo
from patchpar.plan.bands import Stencil
from patchpar.shard.precision import wide

Conv = nn.Conv2d | nn.Conv3d


class ConvolutionLike(Protocol):
    """The attributes used of a convolution, a module or the arguments of a call, as in nn.Conv2d."""

    @property
    def weight(self) -> Tensor:
        """[out channels, in channels / groups, kernel rows, kernel columns], for videos with frames before rows."""

    @property
    def bias(self) -> Tensor | None:
        """[out channels]."""

    @property
    def kernel_size(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def padding(self) -> str | tuple[int, ...]: ...
    @property
    def dilation(self) -> tuple[int, ...]: ...
    @property
    def groups(self) -> int: ...


class GroupNormLike(Protocol):
    """The attributes used of a group norm, a module or the arguments of a call, as in nn.GroupNorm."""

    @property
    def num_channels(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def weight(self) -> Tensor | None:
        """[C]."""

    @property
    def bias(self) -> Tensor | None:
        """[C]."""

    @property
    def eps(self) -> float: ...


VALUES_PER_WEIGHT = 8  # map values for each weight, up to which a copy costs less than a second pass over the weights
TINY = 1e-12  # keeps 1/std finite on a constant map, far below the variance of any other


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of each group, in fp32 or fp64. They merge exactly."""

    num: Tensor  # [1], values per group
    mean_BG: Tensor
    m2_BG: Tensor


def moments_of(x: Tensor, num_groups: int) -> Moments:
    """Return the moments of this rank's band `x` [B, C, ...]. torch's group norm kernel computes them in one pass.

    E[x^2] - E[x]^2 would cancel in half precision (std 1 at mean 30 is lost in bf16): fp32 and deviations do not.
    """
    batch, channels = x.shape[:2]
    x = wide(x).contiguous()
    size = math.prod(x.shape[2:])
    _, mean_BG, rstd_BG = torch.native_group_norm(x, None, None, batch, channels, size, num_groups, TINY)
    count = size * channels // num_groups
    m2_BG = (rstd_BG.pow(-2) - TINY).clamp_min(0).mul(count)
    return Moments(torch.full((1,), float(count), device=x.device, dtype=x.dtype), mean_BG, m2_BG)


def pack_moments(moments: Moments) -> Tensor:
    """Return the moments as one small tensor to send: [1 + 2 * B * G]."""
    return torch.cat([moments.num, moments.mean_BG.flatten(), moments.m2_BG.flatten()])


def merge_moments(packed: Sequence[Tensor], shape: tuple[int, int]) -> Moments:
    """Merge the packed moments [1 + 2 * B * G] of all bands; `shape` is (B, G).

    Exact for any counts and means (Chan, Golub, LeVeque 1979).
    """
    all_P = torch.stack(list(packed))
    count_P11 = all_P[:, 0, None, None]
    mean_PBG, m2_PBG = all_P[:, 1:].view(len(packed), 2, *shape).unbind(1)
    count = count_P11.sum()
    mean_BG = (mean_PBG * (count_P11 / count)).sum(0)
    m2_BG = (m2_PBG + count_P11 * (mean_PBG - mean_BG).square()).sum(0)
    return Moments(count, mean_BG, m2_BG)


def unpack_moments(packed: Tensor, shape: tuple[int, int]) -> Moments:
    """Return the moments that `pack_moments` packed into [1 + 2 * B * G]; `shape` is (B, G)."""
    mean_BG, m2_BG = packed[1:].view(2, *shape).unbind(0)
    return Moments(packed[:1], mean_BG, m2_BG)


def correct_moments(whole: Moments, own: Moments, now: Moments, least: float = 0.0) -> Moments:
    """Return the stale moments of the whole, plus the change of this rank's own since.

    DistriFusion's corrected asynchronous group norm (arXiv:2402.19481, section 4): mean' = mean + (own now - own), and
    the same for E[x^2], so var' = E'[x^2] - mean'^2, and the rank's own variance where that is below `least` times it:
    0 in the paper. Written out, the squares of the means cancel, which keeps fp32 exact enough where means are large.
    The variance is biased, as in nn.GroupNorm.
    """
    moved_BG = now.mean_BG - own.mean_BG
    var_BG, own_var_BG, now_var_BG = (moments.m2_BG / moments.num for moments in (whole, own, now))
    corrected_BG = var_BG + (now_var_BG - own_var_BG) + 2 * moved_BG * (own.mean_BG - whole.mean_BG)
    corrected_BG = torch.where(corrected_BG < least * now_var_BG, now_var_BG, corrected_BG)
    return Moments(whole.num, whole.mean_BG + moved_BG, corrected_BG * whole.num)


def as_published(moments: Moments, num_own: Tensor) -> Moments:
    """Return the moments with the variance times N/(N - 1), N = `num_own` [1] values per group of this rank's band.

    DistriFusion's code does so; its paper (arXiv:2402.19481) does not mention it, and nn.GroupNorm is biased.
    """
    return moments._replace(m2_BG=moments.m2_BG * (num_own / (num_own - 1).clamp_min(1)))


class Normalise:
    """Group norm with given moments, for this rank's band and a neighbour's edge rows."""

    def __init__(self, norm: GroupNormLike, moments: Moments) -> None:
        batch, per_group = moments.mean_BG.shape[0], norm.num_channels // norm.num_groups
        self._mean = moments.mean_BG.repeat_interleave(per_group, dim=1).flatten()
        self._var = (moments.m2_BG / moments.num).repeat_interleave(per_group, dim=1).flatten()
        self._weight = None if norm.weight is None else norm.weight.to(self._mean.dtype).repeat(batch)
        self._bias = None if norm.bias is None else norm.bias.to(self._mean.dtype).repeat(batch)
        self._eps = norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `x` [B, C, ...] in one pass: batch norm's inference kernel over B * C channels."""
        flat = x.to(self._mean.dtype).reshape(1, x.shape[0] * x.shape[1], -1)
        y = F.batch_norm(flat, self._mean, self._var, self._weight, self._bias, training=False, eps=self._eps)
        return y.view(x.shape).to(x.dtype)


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
    padding = list(conv.padding)
    padding[dim] = 0
    function: Callable[..., Tensor] = F.conv2d if conv.weight.ndim == 4 else F.conv3d
    bias = None if conv.bias is None else conv.bias.to(x.dtype)
    return function(x, conv.weight.to(x.dtype), bias, conv.stride, tuple(padding), conv.dilation, conv.groups)


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


def is_heavy(conv: ConvolutionLike, x: Tensor) -> bool:
    """Whether `x` [B, C, ..., h, W] is small beside the weights, so that `convolve_with_halo` after the halo is faster.

    A kernel reads its weights once per call, however few the rows, and some kernels copy them into another order first.
    """
    return x.numel() <= VALUES_PER_WEIGHT * conv.weight.numel()


def convolve_with_halo(conv: ConvolutionLike, x: Tensor, dim: int, stencil: Stencil, halo: Halo) -> Tensor:
    """Convolve the band `x` [B, C, ..., h, W] with its halo concatenated, zeros at the edges of the image.

    For thin bands and large weights.
    """

    def zeros(rows: int) -> list[Tensor]:
        shape = list(x.shape)
        shape[dim] = rows
        return [x.new_zeros(shape)] if rows else []

    before = zeros(stencil.before) if halo.before is None else [halo.before]
    size = x.shape[dim]
    outputs = -(-size // stencil.stride)
    needed = (outputs - 1) * stencil.stride + stencil.extent - stencil.padding - size
    after = zeros(max(0, needed)) if halo.after is None else [halo.after]
    return convolve(conv, torch.cat([*before, x, *after], dim), dim)
