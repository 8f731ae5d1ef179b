"""Operations of a block, other than attention, that mix its tokens; and their replacements while tokens are searched.

    sum              over all tokens: a matrix product, as linear attention's of values and keys, or torch's sum
    convolution      2D, over the rows and columns that the tokens are laid out in, or over the frames of a video

During the search a severed sum returns constants, and a severed convolution reads each cell alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.plan.kv_selection import TokensAcross
from patchpar.shard.unet.layers import ConvolutionArguments

PRODUCTS: frozenset[Any] = frozenset({torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__})
SUMS: frozenset[Any] = frozenset({torch.sum, Tensor.sum})


@dataclass(frozen=True, slots=True)
class TokenMixing:
    """The calls that mix tokens in a block, by number; sums and convolutions are counted separately.

    `row_counts`: arguments of the block that hold the number of rows of tokens, which its convolutions need.
    `of_video`: whether these are over the rows of each frame; `frame_convolutions` then are over frames, each frame
    being one row of tokens, and `frame_counts` hold the number of frames.
    """

    sums: tuple[int, ...] = ()
    convolutions: tuple[int, ...] = ()
    row_counts: tuple[str, ...] = ()
    frame_convolutions: tuple[int, ...] = ()
    frame_counts: tuple[str, ...] = ()
    of_video: bool = False

    @property
    def reach(self) -> bool:
        """Whether there are convolutions."""
        return bool(self.convolutions or self.frame_convolutions)

    def counts_along(self, across: TokensAcross) -> tuple[str, ...]:
        """Return the arguments that count the split rows or frames."""
        return self.row_counts if across.rows is None else self.frame_counts

    def counting(self, names: tuple[str, ...], across: TokensAcross) -> "TokenMixing":
        """Return the same with `names` as the arguments that count them."""
        return replace(self, row_counts=names) if across.rows is None else replace(self, frame_counts=names)

    def reaching(self, across: TokensAcross) -> tuple[int, ...]:
        """Return the convolutions that read other ranks' tokens in this split."""
        return self.convolutions if across.rows is None else self.frame_convolutions


def summed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the terms [..., n] of a torch.sum over one dim, that dim last; None for other calls."""
    if func not in SUMS:
        return None
    x = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    return x.movedim(dim, -1) if isinstance(x, Tensor) and type(dim) is int and x.ndim else None


def is_sum(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may sum over tokens."""
    return func in PRODUCTS or summed(func, args, kwargs) is not None


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """A call of torch's conv2d that keeps the number of rows and columns and reads more than one cell."""

    x_BCHW: Tensor
    arguments: ConvolutionArguments

    @classmethod
    def of(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "ConvolutionCall | None":
        """Return the call as one of these; None for any other call."""
        return _convolution(*args, **kwargs) if func is F.conv2d else None

    def grid(self, sequences: int) -> Tensor:
        """Return the input as [B, C, planes, rows, columns], with B = `sequences` and frames as planes."""
        planes = self.x_BCHW.shape[0] // sequences if self.x_BCHW.shape[0] % sequences == 0 else 1
        return torch.unflatten(self.x_BCHW, 0, (-1, planes)).movedim(1, 2)

    def severed(self) -> Tensor:
        """Return an output [B, K, H, W] in which each cell depends on the same cell of the input only."""
        given, dtype = self.arguments, self.x_BCHW.dtype
        bias = None if given.bias is None else given.bias.to(dtype)
        return F.conv2d(self.x_BCHW, given.weight.sum((2, 3), keepdim=True).to(dtype), bias, groups=given.groups)


def _convolution(input: Tensor, *args: Any, **kwargs: Any) -> ConvolutionCall | None:
    conv = ConvolutionArguments.of(*args, **kwargs)
    reach = tuple(spread * (size - 1) // 2 for spread, size in zip(conv.dilation, conv.kernel_size, strict=True))
    same = conv.padding == reach and conv.stride == (1, 1) and all(size % 2 for size in conv.kernel_size)
    return ConvolutionCall(input, conv) if same and input.ndim == 4 and any(reach) else None


class MixingSevered:
    """Records the sums and convolutions of one run of a block; severs the sums in `sums` and all convolutions.

    `seen`: their inputs by name, such as "product 0 left", "sum 1 terms" and "convolution 1 cells".
    `sequences`: how many sequences of tokens the block is called with; a batch of 2 is two.
    """

    def __init__(self, sums: frozenset[int], sequences: int) -> None:
        self._sums, self._sequences = sums, sequences
        self._number = self._convolutions = 0
        self.seen: dict[str, Tensor] = {}

    def answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the function, or its severed replacement."""
        if is_sum(func, args, kwargs):
            return self._sum(func, args, kwargs)
        convolution = ConvolutionCall.of(func, args, kwargs)
        if convolution is None:
            return func(*args, **kwargs)
        name, self._convolutions = f"convolution {self._convolutions}", self._convolutions + 1
        grid = convolution.grid(self._sequences)
        self.seen[f"{name} grid"], self.seen[f"{name} cells"] = grid, grid.flatten(2)
        return convolution.severed()

    def _sum(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        number, self._number = self._number, self._number + 1
        terms = summed(func, args, kwargs)
        if terms is not None:
            self.seen[f"sum {number} terms"] = terms
        else:
            factors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            for side, factor in zip(("left", "right"), factors, strict=False):
                self.seen[f"product {number} {side}"] = factor
        found: Tensor = func(*args, **kwargs)
        if number not in self._sums:
            return found
        noise = torch.rand(found.shape, generator=torch.Generator().manual_seed(number))
        return (noise + 0.5).to(found)
