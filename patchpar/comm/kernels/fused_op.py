"""Registration of fused kernels as torch operators, and the choice between a kernel and its eager twin."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from patchpar.comm.kernels.triton_check import has_triton, runs_kernels
from patchpar.launch.accelerators import CUDA

NAMESPACE = "patchpar"
SHAPES_KEPT = 1024  # of arguments, whose launches are computed once: every layer asks, in every call

P = ParamSpec("P")
R = TypeVar("R")

_ON_META: ContextVar[bool] = ContextVar("patchpar_fused_on_meta", default=False)
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@contextmanager
def fused_without_values() -> Iterator[None]:
    """Context in which tensors on the meta device go through kernels, by their fakes, as those of a GPU do."""
    token = _ON_META.set(True)
    try:
        yield
    finally:
        _ON_META.reset(token)


def is_fused(x: Tensor) -> bool:
    """Whether `x`, of any shape, goes through a kernel: on a GPU, and not in fp64, since kernels add in fp32."""
    kind = x.device.type
    if kind == CUDA:
        if type(x) is Tensor:
            return runs_kernels(x.get_device(), x.dtype)
        return x.dtype != torch.float64 and has_triton()
    return kind == "meta" and _ON_META.get() and x.dtype != torch.float64


def nothing(*_: object) -> None:
    """The fake of operators that only write to their arguments."""


class FusedOp(Generic[P, R]):
    """Runs an operator on GPUs, and its eager twin elsewhere. The first argument decides, a tensor of any shape.

    An operator's dispatch to Python costs 10 us, so that its kernel is launched without it where nothing watches or
    records operators: autograd, a compiler, a mode or a tensor subclass.
    """

    def __init__(self, operator: Any, eager: Callable[P, R], launch: Callable[P, R]) -> None:
        self._operator, self._eager, self._launch = operator, eager, launch
        update_wrapper(self, eager)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        x: Any = args[0]
        if type(x) is not Tensor or x.device.type != CUDA:
            return (self.fused if is_fused(x) else self._eager)(*args, **kwargs)
        # On a GPU as `is_fused` and `fused` have it, without a call of either in every layer.
        if not runs_kernels(x.get_device(), x.dtype):
            return self._eager(*args, **kwargs)
        watched = torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled()
        launched = not watched and torch._C._len_torch_dispatch_stack() == 0
        return (self._launch if launched else self._operator)(*args, **kwargs)

    def fused(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """As a call, with a first argument that `is_fused`."""
        if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled() or type(args[0]) is not Tensor:
            return self._operator(*args, **kwargs)
        launched = torch._C._len_torch_dispatch_stack() == 0
        return (self._launch if launched else self._operator)(*args, **kwargs)


def fused_op(schema: str, *, eager: Callable[P, R], launch: Callable[P, R], fake: Callable[P, R]) -> FusedOp[P, R]:
    """Register `patchpar::<schema>`; return a function that runs the operator on GPUs and calls `eager` elsewhere.

    `launch` is exactly one kernel launch. `fake` returns empty tensors of the same shapes, dtypes and strides as
    `eager`. The operator has no backward: denoisers and VAEs run without gradients.
    """
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, launch, CUDA.upper())  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return FusedOp(getattr(getattr(torch.ops, NAMESPACE), name).default, eager, launch)
