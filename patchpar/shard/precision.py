"""Floating-point format of sums."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return `x`, of any shape, in fp32, or in fp64 if it is: the format of sums and moments."""
    return x if x.dtype == torch.float64 else x.float()
