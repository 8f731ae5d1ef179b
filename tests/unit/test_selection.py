"""Which rows one place sends to another, and how many tokens each of them stands for."""

from __future__ import annotations

import math

import pytest

from patchpar.plan.kv_selection import AllRows, KVSelection, NearRows, NearRowsAndPooled, PooledRows, TokensAcross

SELECTIONS: tuple[KVSelection, ...] = (AllRows(), NearRows(0.3), NearRows(1.0), NearRowsAndPooled(0.1, 4))


def test_everything_is_everything_from_everybody() -> None:
    assert [AllRows().pieces(sender, 0, 5) for sender in (1, 2, 3)] == [(PooledRows(0, 5),)] * 3


@pytest.mark.parametrize(("fraction", "count"), [(0.01, 1), (0.3, 3), (0.5, 5), (1.0, 10), (1, 10)])
def test_the_band_lies_next_to_the_receiver(fraction: float, count: int) -> None:
    assert NearRows(fraction).pieces(1, 2, 10) == (PooledRows(10 - count, 10),)
    assert NearRows(fraction).pieces(2, 1, 10) == (PooledRows(0, count),)


def test_nobody_but_the_neighbours_sends_a_band() -> None:
    assert [bool(NearRows(1.0).pieces(sender, 3, 8)) for sender in (0, 1, 2, 4, 5)] == [False, False, True, True, False]


def test_the_rest_is_averaged() -> None:
    selection = NearRowsAndPooled(0.25, 2)
    assert selection.pieces(0, 1, 8) == (PooledRows(6, 8), PooledRows(0, 6, 2))
    assert selection.pieces(1, 0, 8) == (PooledRows(0, 2), PooledRows(2, 8, 2))
    assert selection.pieces(3, 1, 8) == (PooledRows(0, 8, 2),)


def test_a_band_of_all_rows_leaves_no_rest() -> None:
    assert NearRowsAndPooled(1.0, 4).pieces(0, 1, 8) == (PooledRows(0, 8),)
    assert NearRowsAndPooled(0.1, 4).pieces(0, 1, 1) == (PooledRows(0, 1),)


@pytest.mark.parametrize(
    "piece", [PooledRows(0, 8), PooledRows(2, 9, 4), PooledRows(0, 1, 3), PooledRows(1, 6, 2), PooledRows(0, 3, 8)]
)
@pytest.mark.parametrize("across", [1, 5, 8])
def test_weights_count_every_token_once(piece: PooledRows, across: int) -> None:
    weights = list(piece.weights(TokensAcross(across)))
    assert len(weights) == piece.num_tokens(TokensAcross(across))
    assert sum(weights) == (piece.stop - piece.start) * across
    assert max(weights) <= piece.pool**2
    assert min(weights) >= 1


def test_weights_by_hand() -> None:
    """Rows 4 + 1, columns 4 + 2."""
    assert list(PooledRows(3, 8, 4).weights(TokensAcross(6))) == [16, 8, 4, 2]
    assert PooledRows(3, 8, 4).windows(TokensAcross(6)) == (1, 2, 2)


def test_windows_stay_in_their_plane() -> None:
    """Five rows of each of two frames; and two frames of five rows."""
    assert list(PooledRows(3, 8, 4).weights(TokensAcross(6, planes=2))) == [16, 8, 4, 2] * 2
    assert list(PooledRows(3, 5, 4).weights(TokensAcross(6, rows=5))) == [16, 8, 4, 2] * 2
    assert PooledRows(3, 5, 4).windows(TokensAcross(6, rows=5)) == (2, 2, 2)
    assert [TokensAcross(6, planes=2).num_tokens, TokensAcross(6, rows=5).num_tokens] == [12, 30]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_rows_are_sent_once_and_exist(selection: KVSelection, rows: int) -> None:
    for sender in (0, 1, 3, 5):
        covered = [row for piece in selection.pieces(sender, 2, rows) for row in range(piece.start, piece.stop)]
        assert len(covered) == len(set(covered))
        assert set(covered) <= set(range(rows))
        if not isinstance(selection, NearRows):
            assert len(covered) == rows


def test_a_band_and_windows_of_four_are_a_small_part() -> None:
    """128 x 128 tokens of a far place are 32 x 32; a neighbour's are 13 rows more."""
    far, near = (
        sum(p.num_tokens(TokensAcross(128)) for p in NearRowsAndPooled(0.1, 4).pieces(s, 0, 128)) for s in (2, 1)
    )
    assert far == 32 * 32
    assert near == 13 * 128 + math.ceil(115 / 4) * 32
