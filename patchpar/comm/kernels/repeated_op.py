"""Fused operators of an exchange point, which has the same tensors in every step: nothing is asked of them again.

To find what a launch needs of its tensors (whether they go through a kernel, dtypes, alignments, the grid) takes longer
than the launch itself. It follows from tensors that stay where they are, and these are known by identity.
"""

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import FusedOp, is_fused
from patchpar.comm.kernels.program import Compiled


def without_result(launch: Callable[..., Compiled | None]) -> Callable[..., None]:
    """Return `launch` as an operator calls it, which returns nothing."""

    def launched(*args: Any) -> None:
        launch(*args)

    return launched


class RepeatedOp:
    """Runs `op`, which returns nothing. Its kernel is launched again at once while all arguments are the same objects.

    `launch`: as that of the operator; it returns what launches the kernel again, if that is known. The storage of a
    tensor must not be replaced.
    """

    def __init__(self, op: FusedOp[..., None], launch: Callable[..., Compiled | None]) -> None:
        self._op, self._launch = op, launch
        self._args: tuple[Any, ...] = ()
        self._compiled: Compiled | None = None  # for these

    def __call__(self, *args: Any) -> None:
        # As `FusedOp` has it: nothing watches or records operators.
        watched = (
            torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack()
        )
        if not watched and self._compiled is not None and all(map(is_, args, self._args)):
            kernel, grid, values = self._compiled
            kernel[grid](*values)
            return
        x: Any = args[0]
        if watched or type(x) is not Tensor or not is_fused(x):
            self._op(*args)
            return
        self._args, self._compiled = args, self._launch(*args)
