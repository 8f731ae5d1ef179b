"""Gather each rank's band of a result into the whole, on all ranks or on the first."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather
from patchpar.comm.transport import Incoming, TensorSpec
from patchpar.shard.vae.band import VaeBand

Join = Callable[[Tensor], Tensor]


def on_all(band: VaeBand, where: str, own: Tensor) -> Tensor:
    """Return the whole [B, C, ..., H, W] on every rank from own [B, C, ..., h, W]. Raises ExchangeError."""
    patch = band.patch
    sizes = [band.scaled(own.shape[band.dim], group_rank) for group_rank in range(len(patch.bands))]
    parts = AllGather(patch.comm, patch.axis, "result", where).parts(own.contiguous(), band.dim, sizes)
    return torch.cat(parts, band.dim)


def on_first(band: VaeBand, where: str, own: Tensor) -> Tensor:
    """Return own [B, C, ..., h, W] of all ranks joined on the first, zeros on the others. Raises ExchangeError."""
    patch, dim = band.patch, band.dim
    shape = list(own.shape)
    shape[dim] = band.whole(own.shape[dim])
    whole = own.new_zeros(shape)
    if patch.group_rank:
        patch.comm.send("result", where, [patch.axis.ranks[0]], [own.contiguous()]).wait()
        return whole
    whole.narrow(dim, 0, own.shape[dim]).copy_(own)
    incoming, start = [], own.shape[dim]
    for group_rank in range(1, len(patch.bands)):
        rows = whole.narrow(dim, start, band.scaled(own.shape[dim], group_rank))
        incoming.append(Incoming(patch.axis.ranks[group_rank], (TensorSpec.of(rows),), (rows,)))
        start += rows.shape[dim]
    patch.comm.send_recv("result", where, [], incoming).wait()
    return whole


def joined(output: Any, join: Join) -> Any:
    """Return the output of a VAE with every tensor of 4 or 5 dims joined, those of a distribution too."""
    if isinstance(output, Tensor):
        return join(output) if output.ndim >= 4 else output
    if isinstance(output, Mapping):
        return type(output)(**{name: joined(value, join) for name, value in output.items()})
    if isinstance(output, tuple):
        return tuple(joined(value, join) for value in output)
    if isinstance(getattr(output, "parameters", None), Tensor):
        return _distribution(output, join(output.parameters))
    return output


def _distribution(like: Any, parameters: Tensor) -> Any:
    if getattr(like, "deterministic", False):
        return type(like)(parameters, deterministic=True)
    return type(like)(parameters)


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors [B, C, ..., H, W] of an output, in order."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    joined(output, note)
    return found
