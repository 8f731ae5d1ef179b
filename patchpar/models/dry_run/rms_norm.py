"""The root mean square norm of torch, which CUDA computes in one kernel and the meta device in up to eight.

By aten/src/ATen/native/layer_norm.cpp: where its weight has the dtype of its input, which is not laid as channels_last.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F

FUNCTIONS: frozenset[Callable[..., Any]] = frozenset({F.rms_norm, torch.rms_norm})
HAS_KERNEL = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
"""torch 2.9 and newer: this operator came with the kernel, the one for the forward has stood for others before."""


class RMSNormCall(NamedTuple):
    """The arguments of rms_norm in torch's order: `input` [..., D], `normalized_shape` (D,), `weight` [D] or None."""

    input: Tensor
    normalized_shape: Sequence[int]
    weight: Tensor | None = None
    eps: float | None = None

    @property
    def is_one_kernel(self) -> bool:
        """Whether CUDA computes it in one kernel."""
        x, weight = self.input, self.weight
        has_layout = x.ndim in (4, 5) and suggest_memory_format(x) != torch.contiguous_format
        return (weight is None or weight.dtype == x.dtype) and x.is_floating_point() and not has_layout

    def empty_results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input as the kernel reads it, and without values what it writes, [..., 1] in fp32 and [..., D]."""
        x = self.input.contiguous()
        rows = x.shape[: x.ndim - len(self.normalized_shape)]
        factors = x.new_empty((*rows, *(1 for _ in self.normalized_shape)), dtype=torch.float32)
        return x, factors, torch.empty_like(x)


def one_kernel(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> RMSNormCall | None:
    """Return the call of a torch function that CUDA computes in one kernel, or None."""
    if func not in FUNCTIONS or not HAS_KERNEL:
        return None
    call = RMSNormCall(*args, **kwargs)
    return call if call.is_one_kernel else None
