"""diffusers' group offloading, for modules whose weights are read although their forward does not run.

The first block of a group loads the weights of the whole group, and the last one offloads them. A block between them,
called alone while tokens are searched, would have no weights, nor would a convolution that is computed in a band.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from patchpar.errors import UnsupportedModel

HOOK = "group_offloading"  # as diffusers names it


def is_offloaded(module: nn.Module) -> bool:
    """Whether a module itself loads or offloads a group."""
    return _hook_of(module) is not None


@contextmanager
def group_here(block: nn.Module) -> Iterator[None]:
    """Keep the weights of the block's group on the compute device while open."""
    hook = _hook_of(block)
    if hook is None:
        yield
        return
    reference = hook.fn_ref
    before = reference.pre_forward, reference.post_forward
    reference.pre_forward, reference.post_forward = _as_it_is, _unchanged
    try:
        hook.group.onload_()
        yield
    finally:
        reference.pre_forward, reference.post_forward = before
        hook.group.offload_()


def refuse_elsewhere(denoiser: nn.Module, device: torch.device) -> None:
    """Raise UnsupportedModel if its groups are loaded to another device than this rank's."""
    hooks = [hook for hook in map(_hook_of, denoiser.modules()) if hook is not None]
    for home in {torch.device(hook.config.onload_device) for hook in hooks}:
        if home.type != device.type or (home.index is not None and home.index != device.index):
            raise UnsupportedModel(
                f"the groups of {type(denoiser).__name__} are loaded to {home}, but this rank is on {device}: use "
                f"onload_device=torch.device({device.type!r}), without an index, which is each rank's own device"
            )


def _hook_of(module: nn.Module) -> Any:
    registry: Any = vars(module).get("_diffusers_hook")
    return None if registry is None else registry.get_hook(HOOK)


def _as_it_is(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def _unchanged(module: nn.Module, output: Any) -> Any:
    return output
