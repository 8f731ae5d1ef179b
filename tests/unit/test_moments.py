"""Group norm from the moments of shares: the one of torch, also where means are large and formats small."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from patchpar.shard.kernels.group_moments import moments_of_band
from patchpar.shard.unet.layers import normalise
from tests.tensors import relative
from tests.unit.parts import cut

SPLITS = [(0, 8, 16), (0, 2, 16), (0, 5, 6, 16), (0, 1, 4, 9, 16)]


def norm_of(groups: int = 4, channels: int = 16, *, affine: bool = True) -> nn.GroupNorm:
    norm = nn.GroupNorm(groups, channels, affine=affine)
    if affine:
        nn.init.normal_(norm.weight, 1.0, 0.2)
        nn.init.normal_(norm.bias, 0.0, 0.2)
    return norm.requires_grad_(False)


def over_patches(norm: nn.GroupNorm, x: Tensor, starts: Sequence[int], dim: int = -2) -> Tensor:
    parts = cut(x, starts, dim)
    moments = torch.stack([moments_of_band(part, norm.num_groups) for part in parts])
    return torch.cat([normalise(norm, part, (moments, ()))[0] for part in parts], dim)


def by_squares(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    """The common mistake: E[x^2] - E[x]^2 in the format of the activations."""
    grouped = x.reshape(x.shape[0], norm.num_groups, -1)
    mean = grouped.mean(-1, keepdim=True)
    var = (grouped.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    y = ((grouped - mean) / (var + norm.eps).sqrt()).view(x.shape)
    return y * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)


@pytest.mark.parametrize("starts", SPLITS)
@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("affine", [True, False])
def test_uneven_patches_give_the_whole_norm(starts: Sequence[int], dim: int, affine: bool) -> None:
    torch.manual_seed(0)
    norm, x = norm_of(affine=affine), torch.randn(2, 16, 16, 16) * torch.linspace(1, 5, 16)
    assert relative(over_patches(norm, x, starts, dim), norm(x)) < 1e-6


def test_maps_of_a_video_and_tokens() -> None:
    torch.manual_seed(0)
    norm = norm_of()
    video, tokens = torch.randn(1, 16, 3, 16, 5), torch.randn(2, 16, 48)
    assert relative(over_patches(norm, video, (0, 7, 16), -2), norm(video)) < 1e-6
    assert relative(over_patches(norm, tokens, (0, 7, 48), -1), norm(tokens)) < 1e-6


def test_without_the_other_patches_the_norm_is_wrong() -> None:
    torch.manual_seed(0)
    norm, x = norm_of(), torch.randn(2, 16, 16, 16) + torch.linspace(0, 3, 16).view(16, 1)
    alone = torch.cat([norm(part) for part in cut(x, (0, 8, 16), -2)], -2)
    assert relative(alone, norm(x)) > 1e-1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("starts", SPLITS)
def test_in_half_precision_at_mean_thirty_no_worse_than_torch(dtype: torch.dtype, starts: Sequence[int]) -> None:
    torch.manual_seed(0)
    norm, x = norm_of().to(dtype), (torch.randn(2, 16, 16, 64) + 30).to(dtype)
    oracle = nn.functional.group_norm(x.double(), 4, norm.weight.double(), norm.bias.double(), norm.eps)
    ours, torchs = over_patches(norm, x, starts), norm(x)
    assert ours.dtype == dtype
    assert relative(ours, oracle) <= 1.001 * relative(torchs, oracle)  # a tie may be rounded the other way
    assert relative(by_squares(norm, x), oracle) > 10 * relative(ours, oracle)


@pytest.mark.parametrize("mean", [1e3, 1e5, -1e6])
def test_huge_means_do_not_cancel(mean: float) -> None:
    torch.manual_seed(0)
    norm, x = norm_of(), torch.randn(1, 16, 16, 16) + mean
    oracle = nn.functional.group_norm(x.double(), 4, norm.weight.double(), norm.bias.double(), norm.eps)
    assert relative(over_patches(norm, x, (0, 5, 16)), oracle) <= 1.5 * relative(norm(x), oracle) + 1e-6


@pytest.mark.parametrize("value", [0.0, 1.0, 30.0, -7e4])
def test_constant_maps_give_the_bias(value: float) -> None:
    norm, x = norm_of(), torch.full((1, 16, 16, 16), value)
    y = over_patches(norm, x, (0, 3, 16))
    torch.testing.assert_close(y, norm.bias.view(1, -1, 1, 1).expand_as(y), atol=1e-4, rtol=0)


def test_patches_that_are_constant_each_by_itself() -> None:
    """All variance lies between the shares."""
    norm = norm_of()
    x = torch.cat([torch.full((1, 16, 6, 16), 2.0), torch.full((1, 16, 10, 16), -3.0)], -2)
    assert relative(over_patches(norm, x, (0, 6, 16)), norm(x)) < 1e-6


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_channels_last_is_kept(batch: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, x = norm_of().to(dtype), torch.randn(batch, 16, 16, 12).to(dtype).to(memory_format=torch.channels_last)
    moments = torch.stack([moments_of_band(patch, norm.num_groups) for patch in cut(x, (0, 6, 16), -2)])
    y, _ = normalise(norm, x, (moments, ()))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert relative(y, norm(x)) < (1e-6 if dtype == torch.float32 else 2e-3)


def test_strided_input() -> None:
    torch.manual_seed(0)
    norm, x = norm_of(), torch.randn(2, 16, 12, 16).transpose(2, 3)
    assert relative(over_patches(norm, x, (0, 6, 16)), norm(x)) < 1e-6
