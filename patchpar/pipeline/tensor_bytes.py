"""Tensors as bytes, for callers that have not imported torch and for files, and back: bit for bit, with strides."""

import torch
from torch import Tensor

from patchpar.errors import ReplayMismatch
from patchpar.pipeline.messages import TensorBytes
from patchpar.shard.host_memory import HostCopy


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
