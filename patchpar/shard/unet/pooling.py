"""Pooling of a whole map to a fixed size, as a diffusers hook: every rank pools all bands, gathered fresh.

The output has the same size for every image and is the same on every rank, and so is all that is computed from it: the
image embedding of I2VGen-XL (arXiv:2311.04145) becomes context tokens that every pixel attends to.
"""

from typing import Any

from diffusers.hooks import ModelHook
from torch import Tensor, nn

from patchpar.shard.local_patch import LocalPatch

MAP_DIMS = 4  # batch, channels, rows, columns; a video has frames too


class PoolingHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """A module without children whose output has one size for maps of all sizes."""

    def __init__(self, patch: LocalPatch, where: str) -> None:
        super().__init__()
        self.patch, self.where = patch, where

    def new_forward(self, module: nn.Module, x: Tensor) -> Any:
        """Replace the module's forward: gather `x` [B, C, ..., h, W] to the whole map; a vector is not gathered."""
        is_map = x.ndim >= MAP_DIMS  # the same module may be called with vectors, which every rank has whole
        whole = self.patch.whole_map("pooling", self.where, x) if self.patch.active and is_map else x
        return self.fn_ref.original_forward(whole)
