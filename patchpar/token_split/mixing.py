"""Operations of a block, other than attention, in which its tokens meet; and how they are watched with none meeting.

    sum              a product of matrices that sums over all tokens, as linear attention's of values and keys
    convolution      2D, over the grid of rows and columns that the tokens are laid out in

While a block is watched, a sum gives numbers that depend on nothing, and a convolution reads the cell itself only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PRODUCTS: frozenset[Any] = frozenset({torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__})


@dataclass(frozen=True, slots=True)
class Mixing:
    """Where tokens meet in a block, by the number of the call, products and convolutions counted by themselves.

    `row_counts`: arguments of the block that say how many rows of tokens there are, which its convolutions need.
    """

    sums: tuple[int, ...] = ()
    convolutions: tuple[int, ...] = ()
    row_counts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Convolution:
    """A call of torch's conv2d that keeps rows and columns as many as they are, and reads beyond a cell."""

    x_BCHW: Tensor
    weight: Tensor
    bias: Tensor | None
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    stride: tuple[int, ...] = (1, 1)

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """As in nn.Conv2d."""
        return tuple(self.weight.shape[2:])

    @classmethod
    def of(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Convolution | None":
        """The call as one of these; None for any other call."""
        return _convolution(*args, **kwargs) if func is F.conv2d else None

    def severed(self) -> Tensor:
        """A value for each cell that depends on that cell alone."""
        weight = self.weight.sum((2, 3), keepdim=True).to(self.x_BCHW.dtype)
        bias = None if self.bias is None else self.bias.to(self.x_BCHW.dtype)
        return F.conv2d(self.x_BCHW, weight, bias, groups=self.groups)


def _convolution(  # noqa: PLR0913 - the signature is torch's
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Convolution | None:
    size = tuple(weight.shape[2:])
    dilations = _pair(dilation)
    reach = tuple(spread * (extent - 1) // 2 for spread, extent in zip(dilations, size, strict=True))
    same = padding == "same" or (not isinstance(padding, str) and _pair(padding) == reach)
    if input.ndim != 4 or not same or _pair(stride) != (1, 1) or not any(reach) or any(each % 2 == 0 for each in size):
        return None
    return Convolution(input, weight, bias, reach, dilations, groups)


def _pair(value: Any) -> tuple[int, ...]:
    found = (value,) if isinstance(value, int) else tuple(value)
    return found * 2 if len(found) == 1 else found


class MixingSevered:
    """Sees the products and convolutions of one run of a block: of products `sums` are severed, and all convolutions.

    `seen`: what goes into them, by name, such as "product 0 left" and "convolution 1 cells".
    """

    def __init__(self, sums: frozenset[int]) -> None:
        self._sums = sums
        self._products = self._convolutions = 0
        self.seen: dict[str, Tensor] = {}

    def answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the function gives, severed where it is to be."""
        if func in PRODUCTS:
            return self._product(func, args, kwargs)
        convolution = Convolution.of(func, args, kwargs)
        if convolution is None:
            return func(*args, **kwargs)
        name, self._convolutions = f"convolution {self._convolutions}", self._convolutions + 1
        self.seen[f"{name} grid"] = convolution.x_BCHW
        self.seen[f"{name} cells"] = convolution.x_BCHW.flatten(2)
        return convolution.severed()

    def _product(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        number, self._products = self._products, self._products + 1
        factors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        for side, factor in zip(("left", "right"), factors, strict=False):
            self.seen[f"product {number} {side}"] = factor
        found: Tensor = func(*args, **kwargs)
        if number not in self._sums:
            return found
        noise = torch.rand(found.shape, generator=torch.Generator().manual_seed(number))
        return (noise + 0.5).to(found)
