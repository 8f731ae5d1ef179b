"""Convolutions of CPUs whose result is one column, as bands split by columns and their borders have.

oneDNN's kernel for Intel's AMX returns wrong values there in bfloat16 with a stride above 1, and raises nothing: with
torch 2.13, of 35,892 convolutions tried all 1,248 wrong ones had one column, at least five rows, a kernel above 1 x 1
and a stride of 2 or 3. Others have met that kernel too (pytorch issue 169688). With rows and columns exchanged the
values are right.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # stride, padding, dilation


def convolve_strided(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes, groups: int
) -> Tensor:
    """Return `function`, F.conv2d or F.conv3d, of `x` [B, C, ..., h, w].

    `weight` [out channels, in channels / groups, ..., kernel rows, kernel columns], `bias` [out channels].
    """
    if sizes[0][-1] == 1 or x.device.type != "cpu" or not _is_one_column(x, weight, sizes):
        return function(x, weight, bias, *sizes, groups)
    exchanged = ((*each[:-2], each[-1], each[-2]) for each in sizes)
    return function(x.mT.contiguous(), weight.mT.contiguous(), bias, *exchanged, groups).mT


def _is_one_column(x: Tensor, weight: Tensor, sizes: Sizes) -> bool:
    """Whether the result is one column in reduced precision. `x` [B, C, ..., h, w], `weight` [..., s, t]."""
    if x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
        return False
    stride, padding, dilation = (each[-1] for each in sizes)
    return x.shape[-1] + 2 * padding - (dilation * (weight.shape[-1] - 1) + 1) < stride
