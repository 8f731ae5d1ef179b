"""A checksum of tensors that is computed where they are, and is the same on all devices.

Elements are read as whole numbers, which are multiplied with odd numbers by position and added up modulo 2^64: whole
numbers add up to the same in any order. It finds accidents, not attacks. Ours.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FACTOR, OFFSET = 0x9E3779B97F4A7C15 - 2**64, 0x2545F4914F6CDD1D  # odd; of splitmix64 and xorshift64*


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of tensors of any shape and dtype: int64 [], on the device of the first one."""
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.zeros((), dtype=torch.int64, device=device)
    for x in tensors:
        total = total * FACTOR + _of(x).to(device) + x.numel()
    return total


def _of(x: Tensor) -> Tensor:
    plain = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    numbers = plain.contiguous().flatten().view(INTEGERS[plain.element_size()]).to(torch.int64)
    position = torch.arange(numbers.numel(), device=x.device)
    factors = (position * FACTOR + OFFSET) | 1
    return (numbers * factors).sum()
