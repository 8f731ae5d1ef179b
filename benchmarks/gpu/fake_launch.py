"""Fused operators on tensors of the CPU as on a GPU, up to the launch: the kernel itself is left out.

All Python of patchpar around a launch runs, and results are allocated in the shapes that the kernel would fill; their
values are whatever is in memory. Not there: what Triton itself takes for the launch of a compiled kernel. Without
Triton the eager twins run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from patchpar.comm.kernels import fused_op
from patchpar.comm.kernels.triton_check import has_triton


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Context in which fused operators take tensors of the CPU for those of a GPU, and launch nothing."""
    if not has_triton():
        yield
        return
    from triton.runtime.jit import JITFunction

    class Compiled:
        """In the place of a compiled kernel."""

        packed_metadata = ()

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return launched

    def launched(*_: Any, **__: Any) -> None:
        """In the place of a launch."""

    def run(*_: Any, **__: Any) -> Compiled:
        """In the place of a first launch."""
        return Compiled()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(fused_op, "CUDA", "cpu"))
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        yield
