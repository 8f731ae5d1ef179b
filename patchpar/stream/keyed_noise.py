"""Noise from a counter-based generator: every rank can sample the noise of any block and step, in any order."""

import numpy as np
import torch
from torch import Tensor

from patchpar.errors import PlanError


def keyed_noise(seed: int, block: int, step: int, shape: tuple[int, ...]) -> Tensor:
    """Return normal noise [*shape] in float32 on the CPU, for denoising step `step` of block number `block`.

    Philox, a counter-based generator (Salmon et al., SC 2011): the seed is its key, step and block are the upper half
    of its counter, so that no two samples overlap. Raises PlanError for a seed that is negative or above 64 bits.
    """
    if not 0 <= seed < 2**64:
        raise PlanError(f"seed={seed}: it must be at least 0 and below 2**64")
    key, counter = np.array([seed, 0], np.uint64), np.array([0, 0, step, block], np.uint64)
    counting = np.random.Philox(key=key, counter=counter)
    generated = np.random.Generator(counting).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(generated)
