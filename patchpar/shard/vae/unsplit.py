"""A VAE that runs whole on one rank, tiled or not; the other ranks return zeros."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.vae.outputs import joined
from patchpar.shard.vae.split import VaeCall, random_numbers_kept

CORNER = 4  # rows and columns of a latent


@contextmanager
def in_tiles(vae: Any) -> Iterator[None]:
    """Enable diffusers' tiling while open. Raises UnsupportedModel for a VAE that has none."""
    if not hasattr(vae, "enable_tiling"):
        raise UnsupportedModel(f"{type(vae).__name__} has no enable_tiling: use vae='rank0' or vae='exact'")
    before = vae.use_tiling
    vae.enable_tiling()
    try:
        yield
    finally:
        vae.use_tiling = before


def is_tiled(vae: nn.Module) -> bool:
    """Whether its tiling is enabled."""
    return bool(getattr(vae, "use_tiling", False))


def stand_in(call: VaeCall) -> Any:
    """Return zeros of the decoded shape, for a rank whose image is not used: a decoded corner shows the ratio."""
    rows, columns = (min(CORNER, size) for size in call.x.shape[-2:])
    with random_numbers_kept(call):
        corner = call.on(call.x[..., :rows, :columns].contiguous())

    def whole(x: Tensor) -> Tensor:
        height, width = (x.shape[dim] * call.x.shape[dim] // size for dim, size in ((-2, rows), (-1, columns)))
        return x.new_zeros((*x.shape[:-2], height, width))

    return joined(corner, whole)
