"""Moments of a group norm over this rank's band, as the small tensor that is sent.

Shape letters: B batch, C channels, G groups, S parts of a group, N = 1 + 2 * B * G. Packed moments [N] are the number
of values per group, the means, and the sums of squared deviations, in fp32 or fp64.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import SHAPES_KEPT, fused_op, is_fused
from patchpar.comm.kernels.program import Prepared, Program
from patchpar.shard.kernels.map_layout import dense, is_channels_last, power_of_2
from patchpar.shard.kernels.moments import merge_moments
from patchpar.shard.precision import wide

TINY = 1e-12  # keeps 1/std finite on a constant map, far below the variance of any other
TILE = 4096  # values that a program reads at once
VALUES_PER_PART = 2**17  # of a group, where it is divided: 256 KiB in half precision, 5 us of one multiprocessor
GROUPS = 16  # of a program that merges parts
MOST_PROGRAMS = 1024  # several for each multiprocessor of any GPU


class GroupLayout(NamedTuple):
    """Where the values of a group are in memory: `rows` of `width` values side by side, and the distances between."""

    rows: int
    width: int
    stride_row: int
    stride_group: int

    @classmethod
    def of(cls, x: Tensor, groups: int) -> "GroupLayout":
        """Return the layout of `x` [B, C, ...], contiguous or channels_last."""
        return _layout_of(x.shape, groups, channels_last=is_channels_last(x))


@lru_cache(maxsize=SHAPES_KEPT)
def _layout_of(shape: tuple[int, ...], groups: int, *, channels_last: bool) -> GroupLayout:
    size, width = math.prod(shape[2:]), shape[1] // groups
    if channels_last:
        return GroupLayout(size, width, shape[1], width)
    return GroupLayout(size * width, 1, 1, size * width)


@lru_cache(maxsize=SHAPES_KEPT)
def parts_of_group(shape: tuple[int, ...], groups: int) -> int:
    """Return S, into how many parts each group of a map of `shape` [B, C, ...] is divided.

    1 where one more launch costs more. torch's kernel has one program for each group: 32 for a VAE's map of one image,
    on a GPU that runs hundreds.
    """
    values = math.prod(shape[1:]) // groups
    if values < 2 * VALUES_PER_PART:
        return 1
    return max(1, min(-(-values // VALUES_PER_PART), MOST_PROGRAMS // (shape[0] * groups)))


def group_moments_eager(x: Tensor, groups: int, parts: int = 1) -> Tensor:
    """Return the packed moments [S, N] of the parts of each group of `x` [B, C, ...]; of whole groups [N].

    E[x^2] - E[x]^2 would cancel in half precision (std 1 at mean 30 is lost in bf16): fp32 and deviations do not. For
    whole groups torch's group norm kernel has them in one pass.
    """
    x = wide(x)
    if parts > 1:
        return _of_parts(x, groups, parts)
    batch, channels = x.shape[:2]
    size = math.prod(x.shape[2:])
    _, mean_BG, rstd_BG = torch.native_group_norm(x.contiguous(), None, None, batch, channels, size, groups, TINY)
    count = size * channels // groups
    m2_BG = (rstd_BG.pow(-2) - TINY).clamp_min(0).mul(count)
    return torch.cat([x.new_full((1,), float(count)), mean_BG.flatten(), m2_BG.flatten()])


def _of_parts(x: Tensor, groups: int, parts: int) -> Tensor:
    layout = GroupLayout.of(x, groups)
    order = (x.movedim(1, -1) if is_channels_last(x) else x).reshape(x.shape[0], -1)
    strides = (order.stride(0), layout.stride_group, layout.stride_row, 1)
    rows_BGRW = order.as_strided((x.shape[0], groups, layout.rows, layout.width), strides)
    packed = []
    for part in rows_BGRW.tensor_split([_rows_per_part(layout, parts) * index for index in range(1, parts)], dim=2):
        count = part.shape[2] * part.shape[3]
        mean_BG = part.mean((2, 3)) if count else part.sum((2, 3))
        m2_BG = (part - mean_BG[:, :, None, None]).square().sum((2, 3))
        packed.append(torch.cat([x.new_full((1,), float(count)), mean_BG.flatten(), m2_BG.flatten()]))
    return torch.stack(packed)


def _rows_per_part(layout: GroupLayout, parts: int) -> int:
    return -(-layout.rows // parts)


_GROUP_MOMENTS = Program("patchpar.shard.kernels.programs.group_moments", "group_moments_program")
_MERGE_PARTS = Program("patchpar.shard.kernels.programs.group_moments", "merge_parts_program")


def launch_group_moments(x: Tensor, groups: int, parts: int = 1) -> Tensor:
    """Launch the kernel: S programs for each group of each sample of `x` [B, C, ...]; see the twin."""
    packed = empty_moments(x, groups, parts)
    _GROUP_MOMENTS.launch_by(_prepared, (x.shape, x.stride(0), is_channels_last(x), groups, parts), (x, packed))
    return packed


def _prepared(shape: tuple[int, ...], stride: int, last: bool, groups: int, parts: int) -> Prepared:
    """Return what a launch needs for a map of `shape`, channels_last if `last`, whose samples are `stride` apart."""
    layout = _layout_of(shape, groups, channels_last=last)
    columns = power_of_2(layout.width)
    rows_per_part = _rows_per_part(layout, parts)
    numbers = groups, layout.rows, rows_per_part, stride, layout.stride_group, layout.stride_row
    constants = {"WIDTH": layout.width, "COLUMNS": columns, "ROWS": max(1, TILE // columns), "num_warps": 8}
    return (shape[0] * groups, parts), numbers, constants


def empty_moments(x: Tensor, groups: int, parts: int = 1) -> Tensor:
    """Return an empty tensor for the packed moments of `x` [B, C, ...]: [S, N], or [N] of whole groups."""
    size = 1 + 2 * x.shape[0] * groups
    shape = (size,) if parts == 1 else (parts, size)
    return x.new_empty(shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


group_moments = fused_op(
    "group_moments(Tensor x, int groups, int parts=1) -> Tensor",
    eager=group_moments_eager,
    launch=launch_group_moments,
    fake=empty_moments,
)


def merge_parts_eager(packed: Tensor) -> Tensor:
    """Return the packed moments [1 + 2 * B * G] of whole groups from those of their parts [S, 1 + 2 * B * G]."""
    merged = merge_moments(packed, (packed.shape[1] // 2, 1))
    return torch.cat([merged.num.view(1), merged.mean_BG.flatten(), merged.m2_BG.flatten()])


def launch_merge_parts(packed: Tensor) -> Tensor:
    """Launch the kernel for `packed` [S, 1 + 2 * B * G]."""
    merged, (parts, size) = empty_merged_parts(packed), packed.shape
    blocks = -(-(size // 2) // GROUPS)
    _MERGE_PARTS.launch(
        (blocks,),
        (packed, merged),
        (parts, size // 2),
        PARTS=power_of_2(parts),
        GROUPS=GROUPS,
    )
    return merged


def empty_merged_parts(packed: Tensor) -> Tensor:
    """Return an empty tensor for the moments [1 + 2 * B * G] of whole groups; `packed` is [S, 1 + 2 * B * G]."""
    return packed.new_empty(packed.shape[1:])


merge_parts = fused_op(
    "merge_parts(Tensor packed) -> Tensor",
    eager=merge_parts_eager,
    launch=launch_merge_parts,
    fake=empty_merged_parts,
)


def moments_of_band(x: Tensor, groups: int, *, fused: bool | None = None) -> Tensor:
    """Return the packed moments [1 + 2 * B * G] of this rank's band `x` [B, C, ...].

    On a GPU one launch, or two for large groups, straight from half precision and from channels_last maps. `fused`:
    whether `x` `is_fused`, if that is known.
    """
    if not (is_fused(x) if fused is None else fused):
        return group_moments_eager(x, groups)
    parts = parts_of_group(x.shape, groups)
    packed = group_moments.fused(dense(x), groups, parts)
    return packed if parts == 1 else merge_parts.fused(packed)
