"""What one place makes of its own and the others' values, against the definitions written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.emulation.policy import EmulatedPolicy
from benchmarks.emulation.sight import (
    Cut,
    KeyValues,
    Moments,
    as_tokens,
    attend,
    context_of,
    convolve,
    corrected,
    merge,
    merged,
    moments_of,
    pooled_tokens,
)
from patchpar.plan.bands import split_bands


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)), dtype=torch.float64)


@pytest.mark.parametrize("kernel", [{"padding": 1}, {"padding": 1, "stride": 2}, {"padding": 2, "dilation": 2}])
@pytest.mark.parametrize("span", [(0, 4), (4, 8), (8, 11)])
@pytest.mark.parametrize("dim", [-2, -1])
def test_convolution_reads_own_rows_and_the_others(kernel: dict[str, int], span: tuple[int, int], dim: int) -> None:
    conv = nn.Conv2d(2, 3, 3, **kernel).double()
    x, others = noise(1, 2, 11, 11), noise(1, 2, 11, 12)[..., :11]
    mixed = others.clone()
    mixed.narrow(dim, span[0], span[1] - span[0]).copy_(x.narrow(dim, span[0], span[1] - span[0]))
    start, stop = (-(-row // conv.stride[0]) for row in span)
    want = conv(mixed).narrow(dim, start, stop - start)
    torch.testing.assert_close(convolve(conv, conv.forward, x, others, span, dim), want)


def test_moments_merge_by_count() -> None:
    x = noise(2, 4, 7, 5) + 30
    parts = [moments_of(part, 2) for part in (x[:, :, :1], x[:, :, 1:3], x[:, :, 3:])]
    groups = x.reshape(2, 2, -1)
    torch.testing.assert_close(merged(parts).mean_BG, groups.mean(-1))
    torch.testing.assert_close(merged(parts).variance_BG, groups.var(-1, correction=0))


def moments(mean: float, square: float) -> Moments:
    return Moments(1, torch.tensor([[mean]]), torch.tensor([[square]]))


def test_corrected_moments() -> None:
    """Mean 1 + (3 - 2) = 2; E[x^2] 10 + (14 - 9) = 15, so a variance of 11."""
    mean, variance = corrected(moments(1.0, 10.0), moments(2.0, 9.0), moments(3.0, 14.0))
    assert (mean.item(), variance.item()) == (2.0, 11.0)


def test_corrected_moments_with_a_negative_variance_take_the_own() -> None:
    """Mean 1 + (3 - 0) = 4; E[x^2] 2 + (10 - 1) = 11, less than 16: own variance 10 - 9."""
    mean, variance = corrected(moments(1.0, 2.0), moments(0.0, 1.0), moments(3.0, 10.0))
    assert (mean.item(), variance.item()) == (4.0, 1.0)


def test_pooled_windows_average_what_they_have() -> None:
    keys = torch.arange(15.0).view(1, 1, 1, 3, 5)
    tokens = pooled_tokens(KeyValues(keys, -keys), 2)
    # 0 1 | 2 3 | 4
    # 5 6 | 7 8 | 9
    # -------------
    # 10 11 | 12 13 | 14
    assert tokens.key.flatten().tolist() == [3, 5, 6.5, 10.5, 12.5, 14]
    assert torch.equal(tokens.value, -tokens.key)
    assert tokens.bias.exp().flatten().round().tolist() == [4, 4, 2, 2, 2, 1]


@pytest.mark.parametrize("side", [2, 3])
def test_pooling_equal_tokens_changes_nothing(side: int) -> None:
    """The bias makes a window of n equal keys weigh as much as they did."""
    windows = noise(1, 2, 4, 3, 2)
    keys = windows.repeat_interleave(side, -2).repeat_interleave(side, -1)[..., :-1, :-1]  # ragged at the end
    piece, query = KeyValues(keys, 2 * keys), noise(1, 2, 5, 4)
    want = attend(query, [as_tokens(piece)], 1.0)
    got = attend(query, [pooled_tokens(piece, side)], 1.0)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)


def test_merged_partials_are_attention_over_all() -> None:
    query, piece = noise(1, 2, 5, 4), KeyValues(noise(1, 2, 4, 3, 6), noise(1, 2, 4, 6, 3).view(1, 2, 4, 3, 6))
    parts = [attend(query, [as_tokens(piece.piece(-2, span))], 0.5) for span in ((0, 1), (1, 3))]
    want = torch.nn.functional.scaled_dot_product_attention(query, *as_tokens(piece)[:2], scale=0.5)
    torch.testing.assert_close(merge(*parts), want)


BANDS = [(0, 8), (8, 16), (16, 24), (24, 28)]  # rows of four places


def rows_seen(group_rank: int, policy: EmulatedPolicy) -> list[tuple[list[float], list[float]]]:
    """Keys that say which row they are of, and how many tokens each stands for: by piece."""
    keys = torch.arange(28.0, dtype=torch.float64).view(1, 1, 1, 28, 1)
    pieces = context_of(group_rank, KeyValues(keys, keys), BANDS, -2, policy)
    return [(part.key.flatten().tolist(), part.bias.exp().flatten().round().tolist()) for part in pieces]


def test_band_is_the_nearest_rows_of_the_two_neighbours() -> None:
    policy = EmulatedPolicy(context="band", fraction=0.3)
    assert rows_seen(1, policy) == [([6, 7], [1, 1]), ([16, 17], [1, 1])]
    assert rows_seen(2, policy) == [([14, 15], [1, 1]), ([24], [1])]
    assert rows_seen(3, policy) == [([22, 23], [1, 1])]


def test_a_band_has_at_least_one_row() -> None:
    assert rows_seen(0, EmulatedPolicy(context="band", fraction=0.01)) == [([8], [1])]


def test_pooled_is_a_band_of_the_neighbours_and_averages_of_the_rest() -> None:
    policy = EmulatedPolicy(context="pooled", band=0.1, pool=4)
    assert rows_seen(2, policy) == [
        ([1.5, 5.5], [4, 4]),  # place 0, far
        ([15], [1]),
        ([9.5, 13], [4, 3]),  # rows 8 to 14: windows start at the piece's first row
        ([24], [1]),
        ([26], [3]),
    ]


def test_all_and_none() -> None:
    keys = [row for keys, _ in rows_seen(1, EmulatedPolicy(context="all")) for row in keys]
    assert keys == [*range(8), *range(16, 28)]
    assert rows_seen(1, EmulatedPolicy(context="none")) == []


@pytest.mark.parametrize(
    ("find", "want"),
    [
        (lambda cut: cut.spans(19), [(0, 8), (8, 12), (12, 19)]),
        (lambda cut: cut.spans(10), [(0, 4), (4, 6), (6, 10)]),
        (lambda cut: cut.spans(5), [(0, 2), (2, 3), (3, 5)]),
        (lambda cut: cut.grid(19 * 9), (19, 9)),
        (lambda cut: cut.grid(5 * 3), (5, 3)),
    ],
)
def test_levels(find: Callable[[Cut], object], want: object) -> None:
    cut = Cut(bands=split_bands(19, 3, 4), size=(19, 9), dim=-2)
    assert find(cut) == want


def test_a_map_of_no_level_is_refused() -> None:
    with pytest.raises(ValueError, match="11 rows fit no level of a latent of 19 x 9"):
        Cut(bands=split_bands(19, 3, 4), size=(19, 9), dim=-2).spans(11)
