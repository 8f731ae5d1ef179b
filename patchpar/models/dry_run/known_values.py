"""Values of small whole numbers and truth values that are on the meta device: sizes, indices and masks.

Code of a network makes tensors of Python numbers on its device, computes with them, and asks for the result: how many
rows an image has, and where each sample ends. What follows from such numbers alone is known without computing more.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from patchpar.models.dry_run.result_form import tensors_of

DTYPES = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
MOST = 4096
"""Numbers in a tensor: in larger ones nothing is computed."""
COPY = "_to_copy"
FACTORIES = frozenset((COPY, "arange", "eye", "full", "ones", "scalar_tensor", "zeros"))
"""Operators of which all is known that makes their results, by name."""
OF_NUMBERS: frozenset[Callable[..., Any]] = frozenset((torch.tensor, torch.as_tensor, torch.Tensor.new_tensor))
"""Functions that make tensors of Python numbers."""
CPU = torch.device("cpu")


class KnownValues:
    """Values by storage, so that views of one tensor have the same, and what is written to one is in all."""

    def __init__(self) -> None:
        self.by_storage: dict[int, Tensor] = {}

    def of(self, x: Tensor) -> Tensor | None:
        """Return the values of a tensor of any shape, which are written to with it; None if they are not known."""
        if x.dtype not in DTYPES or x.numel() > MOST:
            return None
        if not x.is_meta:
            return x
        known = self.by_storage.get(id(x.untyped_storage()))
        if known is None or known.dtype != x.dtype:
            return None
        return known.as_strided(x.shape, x.stride(), x.storage_offset())

    def made(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Tensor) -> None:
        """Keep the values of a result [...] on the meta device, of an operator on no tensor there."""
        if found.dtype in DTYPES and _is_small(found) and func.overloadpacket.__name__ in FACTORIES:
            self._keep(found, func(*args, **_on_cpu(kwargs)))

    def answered(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> Any:
        """Return the result of an operator, which without values is `found`, of those that its arguments have."""
        if func.is_view:
            return found  # of the same storage
        if func._schema.is_mutable and self._forgets(args, kwargs):
            return found
        if not self._knows_all(args, kwargs) or torch.Tag.nondeterministic_seeded in func.tags:
            return found
        several = tensors_of(found if isinstance(found, (tuple, list)) else (found,))
        if not all(map(_is_small, several)):
            return found
        return self._kept(found, func(*tree_map(self._valued, args), **_on_cpu(tree_map(self._valued, kwargs))))

    def _forgets(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether what is written to gets values that are not known. It has none from then on."""
        if self._knows_all(args, kwargs):
            return False
        for x in tensors_of((*args[:1], *kwargs.values())):
            self.by_storage.pop(id(x.untyped_storage()), None)
        return True

    def _knows_all(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return all(self.of(x) is not None for x in tensors_of((*args, *kwargs.values())))

    def _valued(self, leaf: Any) -> Any:
        return self.of(leaf) if isinstance(leaf, Tensor) else leaf

    def _kept(self, found: Any, real: Any) -> Any:
        """Return a result in the form of `found` with the values of `real`."""
        if isinstance(found, (tuple, list)):
            return type(found)(self._kept(each, value) for each, value in zip(found, real, strict=True))
        if not isinstance(found, Tensor) or not found.is_meta:
            return real
        if found.shape != real.shape:  # which values tell
            found = torch.empty_like(real, device=found.device)
        self._keep(found, real)
        return found

    def _keep(self, x: Tensor, values: Tensor) -> None:
        """Keep the values of `x`, a tensor of any shape with a storage of its own."""
        storage = x.untyped_storage()
        if x.dtype not in DTYPES or id(storage) in self.by_storage:
            return  # written to where it is
        whole = torch.zeros(storage.nbytes() // x.element_size(), dtype=x.dtype)
        whole.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(values)
        self.by_storage[id(storage)] = whole
        weakref.finalize(storage, self.by_storage.pop, id(storage), None)


def of_numbers(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function of `OF_NUMBERS` makes. Of Python numbers for the meta device, they are copied there.

    There torch itself makes a tensor without them.
    """
    own, *data = args if func is torch.Tensor.new_tensor else (None, *args)
    device = kwargs.get("device") or (None if own is None else own.device)
    if device is None or torch.device(device).type != "meta" or any(isinstance(each, Tensor) for each in data):
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "device": CPU}).to(device)


def _is_small(x: Tensor) -> bool:
    return x.numel() <= MOST


def _on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for values, which are on the CPU."""
    return {**kwargs, "device": CPU} if kwargs.get("device") is not None else dict(kwargs)
