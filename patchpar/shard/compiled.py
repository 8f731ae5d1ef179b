"""Modules that torch has compiled: which they are, and how to run them as they are written.

Without torch, since who only describes a pipeline need not import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def is_compiled(module: Any) -> bool:
    """Whether `module.compile()` or compile_repeated_blocks() has been there."""
    return module._compiled_call_impl is not None


def is_wrapped(module: Any) -> bool:
    """Whether `torch.compile(module)` made this, a module that stands in the place of another."""
    return "_orig_mod" in module._modules


def compiled_in(network: Any) -> list[str]:
    """Paths of the modules in a network that are compiled, in either way; the network itself is ""."""
    return [path for path, module in network.named_modules() if is_compiled(module) or is_wrapped(module)]


@contextmanager
def uncompiled(network: nn.Module) -> Iterator[None]:
    """While open, compiled modules run as they are written."""
    found: list[Any] = [module for module in network.modules() if is_compiled(module)]
    compiled = [module._compiled_call_impl for module in found]
    try:
        for module in found:
            module._compiled_call_impl = None
        yield
    finally:
        for module, implementation in zip(found, compiled, strict=True):
            module._compiled_call_impl = implementation
