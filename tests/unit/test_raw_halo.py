"""A convolution with the raw rows of a norm's exchange: joined in one copy as on GPUs, or mended as on CPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from patchpar.comm.exchange_part import Halo
from patchpar.comm.kernels.fused_op import fused_without_values
from patchpar.shard.kernels.group_moments import moments_of_band
from patchpar.shard.unet.layers import (
    RawHalo,
    convolve_with_halo,
    copies_band,
    mend_borders,
    normalise,
    stencil_of,
)
from tests.unit.parts import with_halo

STARTS = (0, 6, 16)
ACTIVATIONS = {
    "SiLU": [nn.SiLU()],
    "SiLU and dropout": [nn.SiLU(), nn.Dropout(0.5).eval()],
    "none": [],
    "GELU": [nn.GELU()],
    "two": [nn.SiLU(), nn.Tanh()],
    "SiLU twice": [nn.SiLU(), nn.SiLU()],
}
Way = Callable[[nn.Conv2d, Tensor, int, RawHalo], Tensor]


def joined(conv: nn.Conv2d, x: Tensor, dim: int, halo: RawHalo) -> Tensor:
    return convolve_with_halo(conv, x, dim, stencil_of(conv, dim), halo)


def mended(conv: nn.Conv2d, x: Tensor, dim: int, halo: RawHalo) -> Tensor:
    return mend_borders(conv, x, conv(x), dim, stencil_of(conv, dim), halo.ready())


def without_activation(conv: nn.Conv2d, x: Tensor, dim: int, halo: RawHalo) -> Tensor:
    return joined(conv, x, dim, RawHalo(halo.halo, halo.terms, dim))


def layers(dtype: torch.dtype = torch.float32) -> tuple[nn.GroupNorm, nn.Conv2d, Tensor]:
    torch.manual_seed(0)
    norm, conv = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    nn.init.normal_(norm.bias, 0.0, 0.3)
    x = torch.randn(2, 8, 16, 16) * 2 + 1
    return norm.to(dtype).requires_grad_(False), conv.to(dtype).requires_grad_(False), x.to(dtype)


def over_bands(
    way: Way, norm: nn.GroupNorm, conv: nn.Conv2d, x: Tensor, dim: int, activations: list[nn.Module]
) -> Tensor:
    bands = [(band.clone(), halo) for band, halo in with_halo(x, STARTS, dim, 1, 1)]
    moments = torch.stack([moments_of_band(band, norm.num_groups) for band, _ in bands])
    found = []
    for band, (before, after) in bands:
        y, terms = normalise(norm, band, (moments, ()))
        for activation in activations:
            y = activation(y)
        found.append(way(conv, y, dim, RawHalo(Halo(before, after), terms, dim, tuple(activations))))
    return torch.cat(found, dim)


@pytest.mark.parametrize("way", [joined, mended])
@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_both_ways_are_the_layers_of_the_whole(way: Way, dim: int, activations: str) -> None:
    norm, conv, x = layers()
    chain = ACTIVATIONS[activations]
    whole = conv(nn.Sequential(*chain)(norm(x)))
    torch.testing.assert_close(over_bands(way, norm, conv, x, dim, chain), whole, atol=2e-6, rtol=1e-5)


def test_without_the_activation_border_rows_are_wrong() -> None:
    norm, conv, x = layers()
    chain = ACTIVATIONS["SiLU"]
    found = over_bands(without_activation, norm, conv, x, -2, chain)
    wrong = (found - conv(nn.SiLU()(norm(x)))).abs().amax((0, 1, 3)) > 1e-3
    assert wrong.nonzero().flatten().tolist() == [5, 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_rows_are_rounded_as_at_their_owner(dtype: torch.dtype) -> None:
    norm, conv, x = layers(dtype)
    chain = ACTIVATIONS["SiLU"]
    one, other = (over_bands(way, norm, conv, x, -2, chain) for way in (joined, mended))
    assert torch.equal(one, other)


@pytest.mark.parametrize("way", [joined, mended])
@pytest.mark.parametrize("dim", [-2, -1])
def test_channels_last_is_kept(way: Way, dim: int) -> None:
    norm, conv, x = layers()
    conv, chain = conv.to(memory_format=torch.channels_last), ACTIVATIONS["SiLU"]
    seen = []

    def noted(conv: nn.Conv2d, y: Tensor, dim: int, halo: RawHalo) -> Tensor:
        found = way(conv, y, dim, halo)
        seen.extend([y, found])
        return found

    last = x.to(memory_format=torch.channels_last)
    found = over_bands(noted, norm, conv, last, dim, chain)
    assert len(seen) == 4
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in seen)
    torch.testing.assert_close(found, conv(nn.SiLU()(norm(x))), atol=2e-6, rtol=1e-5)


def test_a_gpu_copies_small_maps_and_mends_large_ones() -> None:
    wide, narrow = (nn.Conv2d(width, width, 3, padding=1) for width in (320, 4))
    sdxl, large = (torch.empty(2, 320, rows, 4 * rows, device="meta", dtype=torch.float16) for rows in (32, 256))
    for conv in (wide, narrow):
        for has_halo in (False, True):
            with fused_without_values():
                assert copies_band(conv, sdxl, has_halo=has_halo)
                assert not copies_band(conv, large, has_halo=has_halo)
    for device in ("cpu", "meta"):  # recorded as on a CPU
        small = torch.empty(2, 320, 8, 32, device=device)
        assert copies_band(wide, small, has_halo=True)
        assert not copies_band(wide, small, has_halo=False), "on a CPU the bulk is convolved during the exchange"
        assert not copies_band(narrow, torch.empty(2, 4, 32, 128, device=device), has_halo=True)


def test_a_dropout_in_training_is_no_silu() -> None:
    for training, found in ((True, None), (False, True)):
        activations = nn.SiLU(), nn.Dropout(0.5).train(training)
        assert RawHalo(Halo(None, None), torch.zeros(3, 1), -2, activations).activates_by_silu is found
