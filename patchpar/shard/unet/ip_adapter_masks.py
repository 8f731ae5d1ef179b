"""Masks of IP-Adapters in bands, as a diffusers hook: the region of the image that each reference image applies to.

A layer's processor scales the mask to its tokens as if they were the whole image. So the mask is scaled here to the
tokens of the whole image, as the processor would; the processor gets this rank's tokens of it, as a mask of one row
that needs no scaling.
"""

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from diffusers.image_processor import IPAdapterMaskProcessor
from torch import Tensor, nn

from patchpar.shard.local_patch import PatchHook
from patchpar.shard.stale.token_grid import LevelGrid

MASKS = "ip_adapter_masks"


def takes_masks(module: nn.Module) -> bool:
    """Whether a layer is attention to reference images that takes masks."""
    processor = getattr(module, "processor", None)
    return processor is not None and MASKS in inspect.signature(processor.__call__).parameters


class MaskHook(PatchHook):
    """Attention of this rank's tokens to reference images, with this rank's part of the masks."""

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces Attention.forward."""
        masks = kwargs.get(MASKS)
        if self.patch.active and masks is not None:
            hidden = args[0] if args else kwargs["hidden_states"]
            own_tokens = hidden.shape[1] if hidden.ndim == 3 else math.prod(hidden.shape[2:])
            kwargs[MASKS] = own_masks(masks, self.patch.grid(own_tokens), self.patch.group_rank)
        return self.fn_ref.original_forward(*args, **kwargs)


def own_masks(masks: Iterable[Tensor | None], grid: LevelGrid, group_rank: int) -> list[Tensor | None]:
    """Return this rank's part of each adapter's masks [1, images, H, W], as [1, images, 1, l] for its `l` tokens.

    `masks` may be a tensor [adapters, 1, H, W] too, with one reference image for each adapter, as in diffusers.
    """
    each = list(masks.unsqueeze(1)) if isinstance(masks, Tensor) else masks
    return [_own(mask, grid, group_rank) if isinstance(mask, Tensor) and mask.ndim == 4 else mask for mask in each]


def _own(mask: Tensor, grid: LevelGrid, group_rank: int) -> Tensor:
    tokens = sum(grid.num_tokens(each) for each in range(len(grid.bands)))
    scaled = [IPAdapterMaskProcessor.downsample(mask[:, number], 1, tokens, 1) for number in range(mask.shape[1])]
    whole_nL = torch.cat(scaled).squeeze(-1)
    columns = grid.across.columns if grid.dim == -2 else grid.bands.total
    whole_nhw = torch.unflatten(whole_nL, 1, (-1, columns))
    own_nhw = whole_nhw.narrow(grid.dim, grid.bands.starts[group_rank], grid.bands.size(group_rank))
    return own_nhw.flatten(1)[None, :, None]
