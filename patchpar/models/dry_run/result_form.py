"""The form of an operator's result on the meta device, so that it is found once for each form of the arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ResultForm:
    """Shape, strides and dtype of each new tensor; `is_tuple`: whether the operator returns several."""

    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    is_tuple: bool

    @classmethod
    def of(cls, found: Any, arguments: Sequence[Tensor]) -> "ResultForm | None":
        """Return the form of a result; None unless it is new tensors on the meta device, none that an argument has.

        Tensors of any shape.
        """
        given = {id(x.untyped_storage()) for x in arguments}
        several = found if isinstance(found, tuple) else (found,)
        for x in several:
            if type(x) is not Tensor or not x.is_meta or id(x.untyped_storage()) in given:
                return None
        return cls(tuple((tuple(x.shape), x.stride(), x.dtype) for x in several), isinstance(found, tuple))

    def made(self) -> Any:
        """Return such tensors, of any shape, or a tuple of them."""
        found = tuple(
            torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in self.tensors
        )
        return found if self.is_tuple else found[0]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors, of any shape, in the arguments or the result of an operator: at most lists in a tuple."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) not in (tuple, list):
        return []
    found = []
    for each in value:
        if isinstance(each, Tensor):
            found.append(each)
        elif type(each) in (tuple, list):
            found += tensors_of(each)
    return found


def key_of(value: Any) -> Any:
    """Return what a result's form depends on; None where an argument is of a kind that is not known to tell."""
    try:
        return _key(value)
    except TypeError:
        return None


def _key(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        return kind, value.shape, value.stride(), value.dtype, value.is_meta
    if kind in (tuple, list):
        return tuple([_key(each) for each in value])
    if kind is dict:
        return tuple([(name, _key(each)) for name, each in value.items()])
    hash(value)
    return kind, value
