"""diffusers' group offloading, while a block is tried by itself.

The first block of a group brings the weights of all of it, and the last one sends them away. A block amid them, called
alone, would find none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

HOOK = "group_offloading"  # as diffusers names it


@contextmanager
def group_here(block: nn.Module) -> Iterator[None]:
    """While open, the weights of the group that a block belongs to are where they are computed with."""
    registry: Any = getattr(block, "_diffusers_hook", None)
    hook = None if registry is None else registry.get_hook(HOOK)
    if hook is None:
        yield
        return
    reference = hook.fn_ref
    before = reference.pre_forward, reference.post_forward
    reference.pre_forward, reference.post_forward = _as_it_is, _as_it_came
    hook.group.onload_()
    try:
        yield
    finally:
        hook.group.offload_()
        reference.pre_forward, reference.post_forward = before


def _as_it_is(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def _as_it_came(module: nn.Module, output: Any) -> Any:
    return output
