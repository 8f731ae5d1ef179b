"""In which format sums are kept."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """In fp32, or in fp64 where it is: what sums and moments are kept in."""
    return x if x.dtype == torch.float64 else x.float()
