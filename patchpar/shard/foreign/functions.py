"""The functions of torch that foreign code calls in a call of a network, with what describes their arguments.

A function counts if foreign code is in the stack of Python frames above it, before a module of the network is: what
modules of the network compute when foreign code calls them is theirs.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchpar.shard.foreign.holders import is_foreign
from patchpar.shard.hooks import OURS, package_of
from patchpar.shard.transformer.local_tokens import LocalTokens

Function = Callable[..., Any]
METADATA_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "requires_grad", "is_meta")
METADATA_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "is_contiguous")
METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in METADATA_PROPERTIES),
        *(getattr(Tensor, name) for name in METADATA_METHODS),
        *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex, torch.numel),
    }
)
"""What they return is Python's: where a number that follows from it has an effect, it is an argument of a function."""
CONSTANT = (bool, int, float, complex, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout)
CALL = nn.Module._call_impl.__code__


class Spec(NamedTuple):
    """Shape and dtype of a tensor argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Many(NamedTuple):
    """A list, tuple, slice or dict of arguments."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


class Unknown(NamedTuple):
    """An argument of another class."""

    kind: type


class FunctionCall(NamedTuple):
    """A function of torch, and its arguments. `on_local_tokens`: it is computed as if on whole tensors."""

    function: Function
    args: Many
    kwargs: Many
    on_local_tokens: bool = False


class ForeignFunctions(TorchFunctionMode):
    """Notes the `calls` by foreign code in a network.

    `is_foreign`: whether a module of that name is. `is_paused`: whether nothing is noted now.
    """

    def __init__(
        self, network: nn.Module, is_foreign: Callable[[str], bool] = is_foreign, is_paused: Callable[[], bool] = bool
    ) -> None:
        super().__init__()
        self.calls: list[FunctionCall] = []
        self._modules = {id(module) for module in network.modules()}
        self._is_foreign, self._is_paused = is_foreign, is_paused
        self._known: dict[tuple[CodeType, str], bool | None] = {}

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or self._is_paused() or not self._is_called_by_foreign(func, sys._getframe(1)):
            return func(*args, **kwargs)
        # described before the call, which may change its arguments
        local = any(issubclass(kind, LocalTokens) for kind in types) or _has_local(args)
        called = FunctionCall(func, described(tuple(args)), described(kwargs), local)
        result = func(*args, **kwargs)
        if not (_is_of_one_number((called.args, called.kwargs)) and _is_number(result)):
            self.calls.append(called)
        return result

    def _is_called_by_foreign(self, func: Function, frame: FrameType | None) -> bool:
        while frame is not None:
            code = frame.f_code
            if code is CALL and id(frame.f_locals["self"]) in self._modules:
                return False
            if code.co_name == "__torch_function__" and frame.f_locals.get("func") is not func:
                return False  # a mode calls another function in its place
            key = code, frame.f_globals.get("__name__", "")
            if key not in self._known:
                self._known[key] = self._origin(*key)
            if (origin := self._known[key]) is not None:
                return origin
            frame = frame.f_back
        return False

    def _origin(self, code: CodeType, module: str) -> bool | None:
        """Whether a frame is of foreign code; None where the frame that called it decides."""
        if package_of(module) == OURS:
            return None if code.co_name == "__torch_function__" else False  # modes pass functions on
        return True if self._is_foreign(module) else None


def _is_number(result: Any) -> bool:
    """Whether a result has no positions."""
    return result.ndim == 0 if isinstance(result, Tensor) else isinstance(result, (bool, int, float))


def _is_of_one_number(tree: Any) -> bool:
    """Whether all tensors among arguments are single numbers, such as a timestep, and there is one."""
    specs = list(_specs_in(tree))
    return bool(specs) and not any(spec.shape for spec in specs)


def _specs_in(tree: Any) -> Iterator[Spec]:
    if isinstance(tree, Spec):
        yield tree
    elif isinstance(tree, Many) or type(tree) is tuple:
        for each in tree.items if isinstance(tree, Many) else tree:
            yield from _specs_in(each)


def _has_local(args: Sequence[Any]) -> bool:
    return any(isinstance(each, LocalTokens) or (isinstance(each, (list, tuple)) and _has_local(each)) for each in args)


def described(value: Any) -> Any:
    """Return a hashable description of arguments: shapes and dtypes of tensors, values of everything else."""
    if isinstance(value, Tensor):
        return Spec(tuple(value.shape), value.dtype)
    if isinstance(value, CONSTANT):
        return value
    if isinstance(value, slice):
        return Many(slice, (), tuple(map(described, (value.start, value.stop, value.step))))
    if type(value) in (list, tuple, torch.Size):
        return Many(list if type(value) is list else tuple, (), tuple(map(described, value)))
    if type(value) is dict:
        return Many(dict, tuple(value), tuple(map(described, value.values())))
    return Unknown(type(value))
