"""Masks of IP-Adapters, cut to a band before a layer scales them: what it would make of the whole one, there."""

from __future__ import annotations

import warnings

import pytest
import torch
from diffusers.image_processor import IPAdapterMaskProcessor

from patchpar.plan.bands import split_bands
from patchpar.plan.kv_selection import TokensAcross
from patchpar.shard.stale.token_grid import LevelGrid
from patchpar.shard.unet.ip_adapter_masks import own_masks


def scaled(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """As a processor of diffusers does it, for two samples and values of 3 channels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the shape of the mask is not the image's
        return IPAdapterMaskProcessor.downsample(mask, 2, tokens, 3)


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("size", [(13, 9), (8, 16), (5, 7)])
@pytest.mark.parametrize("shape", [(104, 72), (64, 128), (50, 50)])
def test_a_band_of_a_mask(dim: int, size: tuple[int, int], shape: tuple[int, int]) -> None:
    """Bands of rows and of columns, not all of one size, under masks of other proportions as well."""
    mask = torch.rand(1, 2, *shape, generator=torch.Generator().manual_seed(0))
    grid = LevelGrid(split_bands(size[dim], 3, 1), TokensAcross(size[-3 - dim]), dim)
    for group_rank in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (own, nothing) = own_masks([mask, None], grid, group_rank)
        assert own is not None
        assert nothing is None
        for number in range(2):
            whole = scaled(mask[:, number], size[0] * size[1]).unflatten(1, size)
            want = whole.narrow(dim - 1, grid.bands.starts[group_rank], grid.bands.size(group_rank)).flatten(1, 2)
            assert torch.equal(scaled(own[:, number], grid.num_tokens(group_rank)), want)
