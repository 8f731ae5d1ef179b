"""Modules compiled by torch: find them, and run them uncompiled.

Does not import torch at run time, since describing a pipeline does not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from patchpar.errors import UnsupportedModel
from patchpar.shard.module_tree import modules_of, named_modules_of

if TYPE_CHECKING:
    from torch import nn

COMPILES_BLOCKS = "compile_repeated_blocks"
LIMIT_ERRORS = frozenset({"RecompileLimitExceeded", "FailOnRecompileLimitHit"})
"""What torch raises with `fullgraph=True` where it has compiled one forward as often as it may. torch 2.11 and newer
have only the second."""
ONE_GRAPH_FOR_ALL = Version("2.8")
"""The first torch whose graphs do not depend on which object an attention processor is."""


def is_compiled(module: Any) -> bool:
    """Whether `module.compile()` or compile_repeated_blocks() has compiled the module."""
    return module._compiled_call_impl is not None


def is_wrapped(module: Any) -> bool:
    """Whether `torch.compile(module)` made this module, which wraps another."""
    return "_orig_mod" in module._modules


def compiled_in(network: Any) -> list[str]:
    """Return paths of the modules in a network that are compiled, in either way; the network itself is ""."""
    return [path for path, module in named_modules_of(network) if is_compiled(module) or is_wrapped(module)]


def refuse_wrapped(network: nn.Module) -> None:
    """Raise UnsupportedModel for modules that `torch.compile(module)` has wrapped: nothing in them is intercepted."""
    if any(map(is_wrapped, modules_of(network))):
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


def unify_processors(network: Any) -> None:
    """Give attention layers whose processors are of one class of diffusers and hold nothing the first of these objects.

    Before `ONE_GRAPH_FOR_ALL` torch compiles a block anew for each object, and a forward 8 times at most.
    """
    first: dict[type, Any] = {}
    for layer in network.modules():
        processor = vars(layer).get("processor")  # those that are modules are not in there
        if type(processor).__module__.startswith("diffusers.") and not vars(processor):
            layer.processor = first.setdefault(type(processor), processor)


def refuse_recompilations(network: object, error: Exception) -> None:
    """Raise UnsupportedModel if `error` is torch's that it has compiled one forward as often as it may."""
    import torch

    if type(error).__name__ not in LIMIT_ERRORS:
        return
    limit = torch._dynamo.config.cache_size_limit
    raise UnsupportedModel(
        f"torch {torch.__version__} has compiled a block of {type(network).__name__} {limit} times, its limit "
        f"(torch._dynamo.config.cache_size_limit): torch before {ONE_GRAPH_FOR_ALL} compiles it for each attention "
        f"processor, and any for each kind of input. Use torch {ONE_GRAPH_FOR_ALL} or newer, call {COMPILES_BLOCKS}() "
        "of a ParallelPipeline, which lets layers share a processor, or leave the blocks uncompiled"
    ) from error
