"""Tensors as bytes, for callers that have not imported torch and for files, and back, bit for bit; and their checksum.

The checksum is computed where tensors are, and is the same on all devices: elements are read as whole numbers, which
are multiplied with odd numbers by position and added up modulo 2^64. Whole numbers add up to the same in any order. It
finds accidents, not attacks. Ours.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from patchpar.errors import ReplayMismatch
from patchpar.pipeline.messages import TensorBytes
from patchpar.shard.host_memory import HostCopy

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FACTOR, OFFSET = 0x9E3779B97F4A7C15 - 2**64, 0x2545F4914F6CDD1D  # odd; of splitmix64 and xorshift64*


def tensor_bytes(x: Tensor) -> TensorBytes:
    """Return a tensor of any shape without torch. Waits for a GPU."""
    own = own_copy(x)
    return bytes_of(own, HostCopy(in_order_of_memory(own)).wait())


def tensor_of(each: TensorBytes, device: torch.device | str = "cpu") -> Tensor:
    """Return the tensor, of any shape, that `tensor_bytes` was given. Raises ReplayMismatch for an unknown dtype."""
    dtype = getattr(torch, each.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ReplayMismatch(f"a recorded tensor has dtype {each.dtype!r}, which torch {torch.__version__} has not")
    found = torch.empty_strided(each.shape, each.stride, dtype=dtype, device=device)
    if each.data:
        in_order_of_memory(found).copy_(torch.frombuffer(bytearray(each.data), dtype=dtype))
    return found


def own_copy(x: Tensor) -> Tensor:
    """Return a copy of any shape without gaps, which has the values of `x` as soon as these arrive."""
    return x.detach().clone()


def in_order_of_memory(x: Tensor) -> Tensor:
    """Return the elements of a tensor without gaps, of any shape, as a view [N]."""
    return x.as_strided((x.numel(),), (1,))


def bytes_of(x: Tensor, copy: Tensor) -> TensorBytes:
    """Return a tensor of any shape whose elements are in `copy` [N] on the host."""
    data = copy.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return TensorBytes(
        dtype=str(x.dtype).removeprefix("torch."), shape=tuple(x.shape), stride=tuple(x.stride()), data=data
    )


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of tensors of any shape and dtype: int64 [], on the device of the first one."""
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.zeros((), dtype=torch.int64, device=device)
    for x in tensors:
        total = total * FACTOR + _checksum_of(x).to(device) + x.numel()
    return total


def _checksum_of(x: Tensor) -> Tensor:
    plain = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    numbers = plain.contiguous().flatten().view(INTEGERS[plain.element_size()]).to(torch.int64)
    position = torch.arange(numbers.numel(), device=x.device)
    factors = (position * FACTOR + OFFSET) | 1
    return (numbers * factors).sum()
