"""Sums over the ranks of an axis, of the same bits on all of them: outputs of Linears divided by features."""

import torch
from torch import Tensor

from patchpar.comm.collectives import AxisComm
from patchpar.comm.transport import FlatParts

SCATTERED = 2**14  # elements from which a sum over more than two ranks is scattered first


def all_reduce(mesh: AxisComm, kind: str, where: str, own: Tensor) -> Tensor:
    """Return the sum of `own`, of any shape, but the same shape and dtype on all ranks of the axis, over them.

    The same bits on all ranks; computed in fp32 or wider, in the dtype of `own` between ranks. A large one is
    scattered first, so that a rank sends 2 (P - 1) / P times its size, not P - 1. Blocks. Raises ExchangeError.
    """
    comm, axis = mesh
    if axis.size <= 2 or own.numel() < SCATTERED:
        return _sum_of(comm.all_gather(axis, kind, where, own).wait())
    part = -(-own.numel() // axis.size)
    padded = own.new_zeros(part * axis.size)
    padded[: own.numel()] = own.reshape(-1)
    sizes = (part,) * axis.size
    into = FlatParts(torch.empty_like(padded), sizes)
    received = comm.all_to_all(axis, kind, where, FlatParts(padded, sizes), into).wait()
    mine = _sum_of(received.view(axis.size, part))
    return comm.all_gather(axis, kind, where, mine).wait().view(-1)[: own.numel()].view(own.shape)


def _sum_of(parts: Tensor) -> Tensor:
    """Return the sum [...] of parts [P, ...] in their order, in their dtype."""
    dtype = torch.float32 if parts.dtype in (torch.float16, torch.bfloat16) else parts.dtype
    return parts.sum(0, dtype=dtype).to(parts.dtype)
