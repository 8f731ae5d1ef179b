"""What a graph repeats of torch's own state: modes of the thread, switches of the process, and the choice of kernels.

A program may change any of it between two steps: precision of products, deterministic kernels, attention kernels.
"""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from patchpar.launch.torch_switches import caller_switches
from patchpar.shard.precision import autocast_dtype


def torch_state(kinds: Iterable[str]) -> Hashable:
    """Return what kernels of devices of these types are chosen by, beside their arguments."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    autocast = tuple((kind, autocast_dtype(kind)) for kind in sorted(kinds))
    switches = tuple((caller_switches() or {}).items())
    return modes, autocast, switches, _is_deterministic(), _attention_kernels()


def _is_deterministic() -> Hashable:
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(), filled


def _attention_kernels() -> Hashable:
    """Return what torch may choose for scaled_dot_product_attention, and what diffusers calls instead of it."""
    allowed: Any = torch.backends.cuda
    are_enabled = (
        *(allowed.flash_sdp_enabled(), allowed.mem_efficient_sdp_enabled(), allowed.math_sdp_enabled()),
        *(allowed.cudnn_sdp_enabled(), allowed.fp16_bf16_reduction_math_sdp_allowed()),
    )
    order: Any = getattr(torch._C, "_get_sdp_priority_order", tuple)  # of torch from 2.6 on
    return are_enabled, tuple(order()), str(_AttentionBackendRegistry.get_active_backend()[0])
