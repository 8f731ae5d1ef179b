"""Blocks with quantised weights in the three forms that libraries use, each in a few lines, with libraries of none.

Int8Weight      a tensor subclass around plain tensors (`__tensor_flatten__`), as those of torchao
PackedWeight    a subclass of nn.Parameter that holds bytes, as diffusers' GGUFParameter
Nf4Linear       codes of four bits in a parameter of bytes, and the scale in a plain attribute, as of bitsandbytes
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.weights.networks import WIDTH

LEVELS = torch.tensor([-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1])


class Int8Weight(Tensor):
    """A weight [out, in] as int8 codes and a scale [out, 1]."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Int8Weight:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]

    @classmethod
    def of(cls, x: Tensor) -> Int8Weight:
        scale = x.abs().amax(1, keepdim=True) / 127
        return cls((x / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.codes.to(x.dtype) * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of a quantised weight")


class OpaqueWeight(Tensor):
    """A weight [out, in] that is elsewhere, and says nothing of where."""

    inner: Tensor

    @staticmethod
    def of(x: Tensor) -> OpaqueWeight:
        made = torch.Tensor._make_wrapper_subclass(OpaqueWeight, x.shape, dtype=x.dtype, device=x.device)
        made.inner = x  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.inner, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0].inner)
        raise NotImplementedError(f"{func} of an opaque weight")


class PackedWeight(nn.Parameter):
    """A weight [out, in] as bytes [out, in + 4]: codes of a row, and its scale."""

    @staticmethod
    def of(x: Tensor) -> PackedWeight:
        scale = x.abs().amax(1, keepdim=True) / 127
        codes = (x / scale).round().to(torch.int8).view(torch.uint8)
        data = torch.cat([codes, scale.contiguous().view(torch.uint8)], 1)
        return torch.Tensor._make_subclass(PackedWeight, data, False)

    def dequantised(self) -> Tensor:
        plain = self.as_subclass(Tensor)
        return plain[:, :-4].contiguous().view(torch.int8).float() * plain[:, -4:].contiguous().view(torch.float32)


class PackedLinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = PackedWeight.of(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.dequantised())


class Nf4Linear(nn.Module):
    """`absmax` [out, 1] is no buffer, so that it stays whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        x = torch.randn(width, width)
        self.absmax = x.abs().amax(1, keepdim=True)
        codes = (x / self.absmax).unsqueeze(-1).sub(LEVELS).abs().argmin(-1).to(torch.uint8)
        self.weight = nn.Parameter(codes[:, ::2] << 4 | codes[:, 1::2], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack([self.weight >> 4, self.weight & 15], -1).flatten(1)
        return F.linear(x, LEVELS[codes.long()] * self.absmax)


def _int8(width: int) -> nn.Module:
    linear = nn.Linear(width, width)
    linear.weight = nn.Parameter(Int8Weight.of(linear.weight.detach()), requires_grad=False)
    return linear


LINEARS: dict[str, Callable[[int], nn.Module]] = {"int8": _int8, "packed": PackedLinear, "nf4": Nf4Linear}


def _opaque(width: int) -> nn.Module:
    linear = nn.Linear(width, width)
    linear.weight = nn.Parameter(OpaqueWeight.of(linear.weight.detach()), requires_grad=False)
    return linear


def _packed_object(width: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is to remove these dtypes
        linear = torch.ao.nn.quantized.dynamic.Linear(width, width)
        weight = torch.quantize_per_tensor(torch.randn(width, width), 0.05, 0, torch.qint8)
    linear.set_weight_bias(weight, torch.randn(width))  # as made, its weight is memory that nothing has written
    return linear


OPAQUE: dict[str, Callable[[int], nn.Module]] = {"opaque": _opaque, "object": _packed_object}
"""Forms that cannot be packed, since their bytes are no plain tensors: a subclass that says nothing, and an object."""


class QuantisedBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), (LINEARS | OPAQUE)[kind](WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class QuantisedChain(nn.Module):
    """Five blocks one after the other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(QuantisedBlock(kind) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class HiddenWeights(nn.Module):
    """A block whose weights are in an object that torch knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = (torch.randn(WIDTH, WIDTH),)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.weights)


def build(kind: str) -> nn.Module:
    """The same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return QuantisedChain(kind).eval().requires_grad_(False)


def bytes_of(network: nn.Module) -> list[Tensor]:
    """Copies of the plain tensors of all weights."""
    found = []
    for x in network.parameters():
        inner = x.__tensor_flatten__()[0] if type(x) is Int8Weight else []
        found += [getattr(x, name).clone() for name in inner] or [x.detach().as_subclass(Tensor).clone()]
    return found
