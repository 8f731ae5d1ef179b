"""Group norm with the moments of all ranks: merged, corrected where they are stale, and applied in one pass.

Shape letters: B batch, C channels, G groups, P ranks, N = 1 + 2 * B * G. Moments are packed, see `kernels.moments`. The
norm is (x - mean) * scale + shift; `terms` [3, B * C] are these three for each channel of each sample.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import fused_op
from patchpar.comm.kernels.program import Prepared, Program
from patchpar.shard.kernels.map_layout import is_channels_last, power_of_2
from patchpar.shard.kernels.moments import (
    Moments,
    as_published,
    correct_moments,
    merge_moments,
    unpack_moments,
)

TILE = 4096  # values of a program
MOST_CHANNELS = 128  # of a program, where they are side by side in memory


def scaled(x: Tensor, terms: Tensor) -> Tensor:
    """Return `x` [B, C, ...] normalised by `terms` [3, B * C] in one pass, by batch norm's inference kernel.

    The format of the map is kept.
    """
    if x.ndim == 3:  # tokens, or a map without width: batch norm knows formats of four and five dims
        return scaled(x.unsqueeze(-1), terms).squeeze(-1)
    wide = x.to(terms.dtype)
    if not is_channels_last(x):
        return _batch_norm(wide.reshape(1, x.shape[0] * x.shape[1], -1), terms).view(x.shape).to(x.dtype)
    samples = [
        _batch_norm(wide.narrow(0, index, 1), of_sample)
        for index, of_sample in enumerate(terms.view(3, x.shape[0], -1).unbind(1))
    ]
    return (samples[0] if len(samples) == 1 else torch.cat(samples)).to(x.dtype)


def _batch_norm(x: Tensor, terms: Tensor) -> Tensor:
    mean, scale, shift = terms.unbind(0)
    mean = mean.detach() if mean.requires_grad else mean  # batch norm has no gradient for it; those of weights remain
    return torch.batch_norm(x, scale, shift, mean, torch.ones_like(mean), False, 0.0, 0.0, False)


def group_norm_eager(
    x: Tensor,
    moments: Tensor,
    groups: int,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    now: Tensor | None = None,
    least: float = 0.0,
    published: bool = False,
    starts: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Return `x` [B, C, ...] normalised with `moments` [P, N] of all ranks, and the terms [3, B * C] used.

    With `now` [N], this rank's moments of this step, all of `moments` are of the last step, and are corrected with
    `least`, see `correct_moments`; with `published`, see `as_published`. For these the first row is this rank's.
    With `starts`, `moments` are [elements] of any buffer, in which those of each rank begin there.
    """
    shape = (x.shape[0], groups)
    if starts:
        moments = torch.stack([moments.narrow(0, start, 1 + 2 * x.shape[0] * groups) for start in starts])
    found = merge_moments(moments, shape)
    if now is not None:
        own = unpack_moments(moments.select(0, 0), shape)
        found = correct_moments(found, own, unpack_moments(now, shape), least)
    if published:
        found = as_published(found, (moments.select(0, 0) if now is None else now).narrow(0, 0, 1))
    terms = terms_of(found, x.shape[1] // groups, eps, weight, bias)
    return scaled(x, terms), terms


def terms_of(moments: Moments, width: int, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the terms [3, B * C] of groups of `width` channels with `moments` [B, G]."""
    mean, dtype = moments.mean_BG.unsqueeze(-1).expand(-1, -1, width), moments.mean_BG.dtype
    scale = (moments.m2_BG / moments.num).add_(eps).rsqrt_().unsqueeze(-1)
    scale = scale.expand(-1, -1, width) if weight is None else scale * weight.to(dtype).view(1, -1, width)
    shift = torch.zeros_like(mean) if bias is None else bias.to(dtype).view(1, -1, width).expand_as(mean)
    return torch.stack([mean, scale, shift]).view(3, -1)


_GROUP_NORM = Program("patchpar.shard.kernels.programs.group_norm", "group_norm_program")


def launch_group_norm(
    x: Tensor,
    moments: Tensor,
    groups: int,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    now: Tensor | None = None,
    least: float = 0.0,
    published: bool = False,
    starts: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for `x` [B, C, ...], contiguous or channels_last; a program has pixels of some channels."""
    y, terms = empty_group_norm(x, moments)
    of_ranks = tuple(starts) or moments.shape[0]
    facts = x.shape, is_channels_last(x), of_ranks, groups, float(eps), float(least), published
    _GROUP_NORM.launch_by(_prepared, facts, (x, y, terms, moments, now, weight, bias))
    return y, terms


def _prepared(
    shape: tuple[int, ...],
    last: bool,
    of_ranks: tuple[int, ...] | int,
    groups: int,
    eps: float,
    least: float,
    published: bool,
) -> Prepared:
    """Return what a launch needs for a map of `shape`, channels_last if `last`.

    `of_ranks`: where the moments of each rank begin, or of how many ranks there are rows.
    """
    grid, size, block_channels, block_pixels = _blocks_of(shape, channels_last=last)
    starts, ranks = (of_ranks, len(of_ranks)) if isinstance(of_ranks, tuple) else ((), of_ranks)
    channels = shape[1]
    numbers = (
        starts or (0,),
        ranks,
        groups,
        channels,
        channels // groups,
        size,
        channels * size,
        1 if last else size,
        channels if last else 1,
        eps,
        least,
    )
    constants = {
        "UNBIASED": published,
        "STARTS": len(starts),
        "RANKS": power_of_2(ranks),
        "CHANNELS": block_channels,
        "PIXELS": block_pixels,
        "num_warps": 8,
    }
    return grid, numbers, constants


def _blocks_of(shape: tuple[int, ...], *, channels_last: bool) -> tuple[tuple[int, int, int], int, int, int]:
    """Return the grid, pixels of a map, and channels and pixels of a program."""
    channels, size = shape[1], math.prod(shape[2:])
    if channels_last:
        block_channels = min(power_of_2(channels), MOST_CHANNELS)
        block_pixels = min(power_of_2(size), TILE // block_channels)
    else:
        block_pixels = min(power_of_2(size), TILE)
        block_channels = min(power_of_2(channels), TILE // block_pixels)
    grid = (-(-size // block_pixels), -(-channels // block_channels), shape[0])
    return grid, size, block_channels, block_pixels


def empty_group_norm(x: Tensor, moments: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the map, in the format of `x` [B, C, ...], and for the terms [3, B * C]."""
    return torch.empty_like(x), moments.new_empty((3, x.shape[0] * x.shape[1]))


normalise_groups = fused_op(
    "group_norm(Tensor x, Tensor moments, int groups, float eps, Tensor? weight=None, Tensor? bias=None, "
    "Tensor? now=None, float least=0.0, bool published=False, int[] starts=[]) -> (Tensor, Tensor)",
    eager=group_norm_eager,
    launch=launch_group_norm,
    fake=empty_group_norm,
)
