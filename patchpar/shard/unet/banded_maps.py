"""Maps that one network leaves in bands to another: residuals of a ControlNet, of which each rank has its own rows.

    ControlNet    rank 0: rows 0 to 15    -> BandedTensor of 32 rows, the first 16 here
                  rank 1: rows 16 to 31   -> BandedTensor of 32 rows, the last 16 here
    pipeline      x + y, 0.5 * x, torch.cat([torch.zeros_like(x), x])    banded as well, of each band alone
    denoiser      takes this rank's rows: nothing is sent

Whatever else reads such a map gathers it, on all ranks, which run the same program.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_map_with_path

from patchpar.comm.banded_tensor import BandedTensor
from patchpar.comm.collectives import AllGather
from patchpar.comm.pytree import leaves, map_tensors
from patchpar.plan.bands import Bands
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.unet.spatial_arguments import level_of, map_of

Call = tuple[Any, Any]  # args, kwargs


def left_in_bands(patch: LocalPatch, where: str, output: Any) -> Any:
    """Return an output with each of its tensors, this rank's band [B, C, ..., h, W], as a BandedTensor of the whole.

    Raises UnsupportedModel for a tensor that is no band of a map.
    """
    return map_tensors(partial(_banded, patch, where), output)


def _banded(patch: LocalPatch, where: str, own: Tensor) -> BandedTensor:
    dim, axis, bands = patch.dim, patch.axis, patch.level(own.shape[patch.dim])
    shape, sizes = list(own.shape), _sizes(bands)
    shape[dim] = bands.total
    gather, parts = AllGather(patch.comm, axis, "residuals", where), list[Tensor]()

    def fetch(number: int) -> Tensor:
        if number == axis.rank:
            return own
        if not parts:
            parts.extend(gather.parts(own.contiguous(), dim, sizes))
        return parts[number]

    return BandedTensor.of(own.new_full(shape, torch.nan), dim, sizes, fetch)


def has_bands(call: Call) -> bool:
    """Whether a call has maps that were left in bands."""
    return any(isinstance(x, BandedTensor) for x in leaves(call))


def with_own_bands(call: Call, patch: LocalPatch, beside: Collection[str]) -> tuple[Call, frozenset[str]]:
    """Return a call with this rank's bands [B, C, ..., h, W] of maps that were left in bands, and their paths.

    Those in other bands than `patch.bands`, and what is no map of the image, are gathered. Raises UnsupportedModel.
    """
    sample, paths, own_rows = map_of(*call), set[str](), patch.bands.size(patch.group_rank)

    def taken(path: Any, x: Any) -> Any:
        if not isinstance(x, BandedTensor):
            return x
        level = level_of(path, x, sample, beside)
        if level is None or x.bands != (patch.dim, _sizes(patch.level(level.of(own_rows)))):
            return x.whole()
        paths.add(keystr(path))
        return x.alone(patch.group_rank)

    return tree_map_with_path(taken, call), frozenset(paths)


def _sizes(bands: Bands) -> tuple[int, ...]:
    return tuple(map(bands.size, range(len(bands))))
