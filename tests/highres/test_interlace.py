"""A large latent is its interlaced patches and nothing else, at any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patchpar.strategies.structure.initial_noise import alike
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.sizing import scale_of

SIZES = [((8, 8), (2, 2)), ((12, 6), (3, 2)), ((16, 8), (4, 1)), ((7, 9), (2, 2)), ((10, 11), (3, 2))]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize(("size", "scales"), SIZES)
def test_joining_undoes_splitting(size: tuple[int, int], scales: tuple[int, int], unit: int) -> None:
    interlace, x_BCHW = Interlace(size, scales, unit), noise(2, 3, *size)
    patches = interlace.split(x_BCHW)
    assert patches.shape == (len(interlace), 2, 3, *interlace.patch_size)
    assert all(side % unit == 0 for side in interlace.patch_size)
    assert torch.equal(interlace.join(patches), x_BCHW)


def test_patches_are_phases() -> None:
    """Patch (i, j) is every second row from i, every third column from j."""
    x_BCHW, interlace = noise(1, 1, 8, 9), Interlace((8, 9), (2, 3))
    for row in range(2):
        for column in range(3):
            assert torch.equal(interlace.split(x_BCHW)[3 * row + column], x_BCHW[..., row::2, column::3])


@pytest.mark.parametrize(
    ("side", "native", "scale"),
    [
        (128, 128, 1),
        (160, 128, 1),
        (192, 128, 2),
        (256, 128, 2),
        (300, 128, 2),
        (384, 128, 3),
        (1024, 128, 8),
    ],
)
def test_patches_are_near_native_size(side: int, native: int, scale: int) -> None:
    assert scale_of(side, native) == scale
    assert scale_of(native // 2, native) == 1
    assert 0.7 < side / scale / native < 1.42


@pytest.mark.parametrize("size", [(16, 24), (15, 22)])
def test_enlarging_keeps_the_anchor_and_fills_in_between(size: tuple[int, int]) -> None:
    """A smooth field, seen at the anchor's samples only, is found again at all others."""
    interlace = Interlace(size, (2, 2))
    rows, columns = torch.arange(size[0]) / 8.0, torch.arange(size[1]) / 9.0
    field = (torch.sin(rows)[:, None] + torch.cos(columns))[None, None]
    anchor = interlace.split(field)[0]
    enlarged = interlace.enlarge(anchor)
    assert torch.allclose(enlarged[0], anchor, atol=1e-5)
    inner = (..., slice(4, -4), slice(4, -4))
    assert (interlace.join(enlarged) - field)[inner].abs().max() < 1e-2
    assert (interlace.join(interlace.repeat(anchor)) - field)[inner].abs().max() > 5e-2


def test_noise_that_is_alike() -> None:
    """Patches agree as far as asked for, by what they have of the anchor, and each is still white and of power 1."""
    interlace = Interlace((128, 128), (2, 2))
    patches = interlace.split(alike(noise(1, 4, 128, 128), interlace, 0.9))
    assert torch.allclose(patches.flatten(1).std(1), torch.ones(4), atol=0.02)
    correlation = torch.corrcoef(patches.flatten(1))
    assert torch.allclose(correlation[0, 1:], torch.full((3,), 0.9**0.5), atol=0.02)
    assert torch.allclose(correlation[1, 2:], torch.full((2,), 0.9), atol=0.02)
    assert torch.equal(alike(patches[0], interlace, 0.0), patches[0])
