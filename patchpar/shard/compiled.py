"""Modules compiled by torch: find them, and run them uncompiled.

Does not import torch at run time, since describing a pipeline does not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from patchpar.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import nn


def is_compiled(module: Any) -> bool:
    """Whether `module.compile()` or compile_repeated_blocks() has compiled the module."""
    return module._compiled_call_impl is not None


def is_wrapped(module: Any) -> bool:
    """Whether `torch.compile(module)` made this module, which wraps another."""
    return "_orig_mod" in module._modules


def compiled_in(network: Any) -> list[str]:
    """Return paths of the modules in a network that are compiled, in either way; the network itself is ""."""
    return [path for path, module in network.named_modules() if is_compiled(module) or is_wrapped(module)]


def refuse_wrapped(network: nn.Module) -> None:
    """Raise UnsupportedModel for modules that `torch.compile(module)` has wrapped: nothing in them is intercepted."""
    if any(map(is_wrapped, network.modules())):
        raise UnsupportedModel(
            f"{type(network).__name__} has blocks that torch.compile(block) has wrapped: compile them by "
            "compile_repeated_blocks() or block.compile(), or use plan cfg=2 or data=N"
        )


@contextmanager
def uncompiled(network: nn.Module) -> Iterator[None]:
    """Context in which compiled modules run uncompiled."""
    found: list[Any] = [module for module in network.modules() if is_compiled(module)]
    compiled = [module._compiled_call_impl for module in found]
    try:
        for module in found:
            module._compiled_call_impl = getattr(module._compiled_call_impl, "uncompiled", None)
        yield
    finally:
        for module, implementation in zip(found, compiled, strict=True):
            module._compiled_call_impl = implementation
