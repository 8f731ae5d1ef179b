"""What ranks run in the tests on GPUs: one denoiser in bands against the same denoiser by itself, on their device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from patchpar.strategies import parse_strategy
from tests.exact import denoisers
from tests.exact.on_ranks import first, patched
from tests.ranks import PoolRank
from tests.tensors import relative


class GpuErrors(NamedTuple):
    """Relative errors against fp64: of the whole denoiser, of its bands, and of bands without exchange."""

    whole: float
    split: float
    alone: float


def on(device: torch.device, dtype: torch.dtype, tree: Any) -> Any:
    """`tree` on a device, its numbers in `dtype`."""
    return tree_map_only(Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), tree)


@torch.no_grad()
def parity(this: PoolRank, name: str, dtype: torch.dtype, strategy: str = "exact") -> GpuErrors:
    device = torch.device(this.context.device)
    denoiser, call = denoisers.build(name).to(dtype), on(torch.device("cpu"), dtype, denoisers.call(name, 24, 16))
    exact = first(denoiser.double()(**on(torch.device("cpu"), torch.float64, call)))
    denoiser, call = denoiser.to(device, dtype), on(device, dtype, call)
    errors = [relative(first(denoiser(**call)).cpu().double(), exact)]
    bands = patched(this, denoiser, strategy=parse_strategy(strategy))
    for bands.exchange in ("on", "off"):
        errors.append(relative(first(bands.denoise(denoiser.forward, **call)).cpu().double(), exact))
    return GpuErrors(*errors)
