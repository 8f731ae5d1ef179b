"""What a graph repeats of torch's own state: modes of the thread, switches of the process, and the choice of kernels.

A program may change any of it between two steps: precision of products, deterministic kernels, attention kernels.
"""

from collections.abc import Hashable, Iterable

import torch

from patchpar.shard.precision import autocast_dtype
from patchpar.shard.torch_switches import caller_switches


def torch_state(kinds: Iterable[str]) -> Hashable:
    """Return what kernels of devices of these types are chosen by, beside their arguments."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = tuple((kind, autocast_dtype(kind)) for kind in sorted(kinds))
    return modes, autocast, tuple((caller_switches() or {}).items())
