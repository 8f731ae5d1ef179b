"""Tokens of a place as a grid: rows of it, averages over windows, and what these count."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.plan.bands import Bands
from patchpar.plan.kv_selection import PooledRows, TokensAcross
from patchpar.shard.stale.token_grid import LevelGrid, log_weights, take, take_bias
from patchpar.shard.stale.token_slots import TokenSlots

ROWS, ACROSS = 5, 7


@pytest.mark.parametrize(
    ("counts", "runs"),
    [
        ((4, 4, 4, 4), [(0, 1, 4), (2, 2, 4)]),
        ((4, 4, 0, 4), [(0, 1, 4), (3, 1, 4)]),
        ((0, 0, 4, 4), [(2, 2, 4)]),
        ((3, 4, 4, 5), [(0, 1, 3), (2, 1, 4), (3, 1, 5)]),
    ],
)
def test_neighbours_with_as_many_tokens_are_handled_together(
    counts: tuple[int, ...], runs: list[tuple[int, int, int]]
) -> None:
    """Beside rank 1, and where ranks without tokens lie between, they do not follow each other."""
    assert list(TokenSlots(counts).others(1)) == runs


def test_ranks_apart_are_handled_alone() -> None:
    assert list(TokenSlots((4, 0, 4, 4)).others(3)) == [(0, 1, 4), (2, 1, 4)]


def grid_of(dim: int) -> LevelGrid:
    return LevelGrid(Bands((0, ROWS, ROWS + 3)), TokensAcross(ACROSS), dim)


def numbered(dim: int) -> Tensor:
    """Tokens [l, 2] in the order they lie in: value `100 * row + column` along and across the split."""
    ij = product(range(ROWS), range(ACROSS)) if dim == -2 else ((i, j) for j in range(ACROSS) for i in range(ROWS))
    return torch.tensor([[100.0 * i + j, 0.5] for i, j in ij])


def found(x: Tensor) -> list[float]:
    return x[:, 0].tolist()


@pytest.mark.parametrize("dim", [-2, -1])
def test_rows_lie_along_the_split(dim: int) -> None:
    taken = take(numbered(dim), [PooledRows(3, 5)], grid_of(dim))
    assert found(taken) == [100.0 * row + column for row in (3, 4) for column in range(ACROSS)]


@pytest.mark.parametrize("dim", [-2, -1])
def test_all_rows_are_the_tokens_as_they_are(dim: int) -> None:
    x = numbered(dim)
    assert take(x, (PooledRows(0, ROWS),), grid_of(dim)) is x


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize(("start", "stop", "pool"), [(0, 5, 2), (1, 5, 3), (0, 5, 8), (4, 5, 2)])
def test_windows_average_what_they_have(dim: int, start: int, stop: int, pool: int) -> None:
    taken = take(numbered(dim), [PooledRows(start, stop, pool)], grid_of(dim))
    want = []
    for top, left in product(range(start, stop, pool), range(0, ACROSS, pool)):
        rows, columns = range(top, min(stop, top + pool)), range(left, min(ACROSS, left + pool))
        values = [100.0 * i + j for i, j in product(rows, columns)]
        want.append(sum(values) / len(values))
    assert found(taken) == pytest.approx(want)
    assert taken[:, 1].unique().tolist() == [0.5]


def test_pieces_follow_each_other() -> None:
    taken = take(numbered(-2), [PooledRows(4, 5), PooledRows(0, 4, 4)], grid_of(-2))
    assert found(taken) == pytest.approx([*(400.0 + j for j in range(7)), 151.5, 155.0])


@pytest.mark.parametrize("dim", [-2, -1])
def test_heads_and_batch_stay_apart(dim: int) -> None:
    x = torch.randn(ROWS * ACROSS, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    taken = take(x, [PooledRows(0, 5, 2), PooledRows(1, 2)], grid_of(dim))
    assert taken.shape == (3 * 4 + ACROSS, 2, 3, 4)
    for batch, head in product(range(2), range(3)):
        one = x[:, batch : batch + 1, head : head + 1]
        torch.testing.assert_close(
            taken[:, batch : batch + 1, head : head + 1],
            take(one, [PooledRows(0, 5, 2), PooledRows(1, 2)], grid_of(dim)),
        )


@pytest.mark.parametrize("pool", [2, 3])
def test_averages_of_equal_tokens_weigh_what_the_tokens_did(pool: int) -> None:
    """With the bias, attention to windows of equal keys is attention to all of the keys."""
    generator = torch.Generator().manual_seed(1)
    windows = torch.randn(1, 4, 4, 8, generator=generator)
    keys = windows.repeat_interleave(pool, 1).repeat_interleave(pool, 2)[:, :ROWS, :ACROSS].reshape(-1, 8)
    rows = min(ROWS, 4 * pool)
    across = min(ACROSS, 4 * pool)
    grid, pieces = LevelGrid(Bands((0, rows)), TokensAcross(across), -2), [PooledRows(0, rows, pool)]
    query = torch.randn(1, 1, 6, 8, generator=generator)
    pooled = take(keys, pieces, grid)[None, None]
    bias = log_weights(pieces, TokensAcross(across))
    whole = keys[None, None]
    want = F.scaled_dot_product_attention(query, whole, whole)
    got = F.scaled_dot_product_attention(query, pooled, pooled, attn_mask=bias.expand(6, -1))
    torch.testing.assert_close(got, want)
    unweighted = F.scaled_dot_product_attention(query, pooled, pooled)
    assert (unweighted - want).norm() > 1e-2 * want.norm()


def test_logarithms_of_weights() -> None:
    weights = log_weights([PooledRows(4, 5), PooledRows(0, 4, 3)], TokensAcross(4))
    torch.testing.assert_close(weights.exp(), torch.tensor([1.0, 1, 1, 1, 9, 3, 3, 1]))
    assert weights.dtype == torch.float32
    assert not log_weights([PooledRows(0, 5)], TokensAcross(4)).any()


def test_a_grid_knows_the_tokens_of_every_position() -> None:
    grid = grid_of(-1)
    assert [grid.rows(position) for position in (0, 1)] == [5, 3]
    assert [grid.num_tokens(position) for position in (0, 1)] == [35, 21]


VIDEO = torch.arange(2.0 * 5 * 7).view(1, 2, 5, 7)  # frames, rows, columns


@pytest.mark.parametrize(
    ("across", "piece", "planes"),
    [
        (TokensAcross(7, planes=2), PooledRows(1, 5, 2), VIDEO[:, :, 1:5]),  # rows of every frame
        (TokensAcross(7, rows=5), PooledRows(1, 2, 2), VIDEO[:, 1:2]),  # frames
        (TokensAcross(7, planes=2), PooledRows(2, 4), VIDEO[:, :, 2:4]),
        (TokensAcross(7, rows=5), PooledRows(0, 1), VIDEO[:, :1]),
    ],
)
def test_frames_are_averaged_each_by_itself(across: TokensAcross, piece: PooledRows, planes: Tensor) -> None:
    grid = LevelGrid(Bands((0, 2 if across.rows else 5)), across, -2)
    want = [
        window.mean().item()
        for plane in planes[0]
        for band in plane.split(piece.pool, 0)
        for window in band.split(piece.pool, 1)
    ]
    assert found(take(VIDEO.reshape(70, 1), [piece], grid)) == pytest.approx(want)
    assert len(want) == piece.num_tokens(across)


@pytest.mark.parametrize("across", [TokensAcross(7), TokensAcross(7, planes=2), TokensAcross(7, rows=5)])
def test_an_average_counts_what_is_not_hidden(across: TokensAcross) -> None:
    rows, generator = (2 if across.rows else 5), torch.Generator().manual_seed(0)
    grid, pieces = LevelGrid(Bands((0, rows)), across, -2), [PooledRows(0, 1), PooledRows(1, rows, 2)]
    tokens = rows * across.num_tokens
    assert take_bias(torch.zeros(tokens), pieces, grid).tolist() == pytest.approx(log_weights(pieces, across).tolist())
    hidden = torch.rand(tokens, generator=generator) < 0.6
    bias = torch.randn(2, 3, tokens, generator=generator).masked_fill(hidden, -torch.inf)
    want = take(bias.exp().view(-1, tokens).t(), pieces, grid).t().reshape(2, 3, -1).log() + log_weights(pieces, across)
    torch.testing.assert_close(take_bias(bias, pieces, grid), want)
    assert want.isneginf().any()
    assert torch.equal(take_bias(bias, [PooledRows(0, rows)], grid), bias)
    assert take_bias(bias - 1e4, pieces, grid).isfinite().any()  # far from 0 they are told apart as well
