"""The layout in memory of results, where torch's kernels have another one than its functions for the meta device.

How a map [B, C, H, W] lies decides which operators copy it. Kernels take it to be channels_last by its strides, that of
a dim with one element included, as views of tokens have it or not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from patchpar.shard.kernels.map_layout import is_channels_last

CONVOLUTION, BATCH_NORM = "convolution", "native_batch_norm"


def has_channels_last(x: Tensor) -> bool:
    """Whether kernels take a map or a weight [B, C, H, W] to have its channels side by side in memory."""
    return x.ndim == 4 and suggest_memory_format(x) == torch.channels_last


def as_kernels_lay(func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> Any:
    """Return what `func` has returned on the meta device, tensors of any shape, as its kernels on devices lay it."""
    name = func.overloadpacket.__name__
    if name == CONVOLUTION and any(map(has_channels_last, args[:2])):
        return _channels_last(found)
    if name == BATCH_NORM and args[0].ndim == 4 and is_channels_last(args[0]):
        return (_channels_last(found[0]), *found[1:])
    is_laid_by_arguments = torch.Tag.pointwise in func.tags and kwargs.get("memory_format") is None
    return _as_laid(found, args) if is_laid_by_arguments and isinstance(found, Tensor) else found


def _channels_last(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _as_laid(found: Tensor, arguments: Sequence[Any]) -> Tensor:
    """Return the result of a pointwise operator with the strides that arguments of its shape all have."""
    strides = {x.stride() for x in arguments if isinstance(x, Tensor) and x.shape == found.shape}
    if len(strides) != 1:
        return found
    (wanted,) = strides
    is_dense = sum((size - 1) * stride for size, stride in zip(found.shape, wanted, strict=True)) == found.numel() - 1
    return found.new_empty_strided(found.shape, wanted) if is_dense and wanted != found.stride() else found


def attended(query: Tensor, width: int) -> Tensor:
    """Return an output of attention [..., q, width] without values: its dims in the order of those of the query."""
    return torch.empty_like(query) if query.shape[-1] == width else query.new_empty((*query.shape[:-1], width))
