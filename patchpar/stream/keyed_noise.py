"""Noise that depends on its key, not on when it is sampled: every rank can sample any of it, in any order."""

import numpy as np
import torch
from torch import Tensor

from patchpar.errors import PlanError


def keyed_noise(seed: int, block: int, step: int, shape: tuple[int, ...]) -> Tensor:
    """Normal noise of `shape`, in float32 on the CPU, for denoising step `step` of block number `block`.

    Philox, a generator that counts (Salmon et al., SC 2011): seed is its key, step and block are the upper half of its
    counter, so that no two samples overlap. Raises PlanError for a negative or larger than 64-bit seed.
    """
    if not 0 <= seed < 2**64:
        raise PlanError(f"seed={seed}: it must be at least 0 and below 2**64")
    key, counter = np.array([seed, 0], np.uint64), np.array([0, 0, step, block], np.uint64)
    counting = np.random.Philox(key=key, counter=counter)
    generated = np.random.Generator(counting).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(generated)
