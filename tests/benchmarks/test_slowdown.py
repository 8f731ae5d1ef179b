"""What sharded weights add stands beside both laws: of gathers beside the computing, and by the core that computes."""

from __future__ import annotations

import pytest

from benchmarks.weights.slowdown import Slowdown
from benchmarks.weights.slowdown_ranks import Turns


def measured(blocks: int, gather: float, sharded: float) -> Slowdown:
    """Two ranks, whose calls take 50 ms, and each block 8 ms of it."""
    turns = Turns(num_bytes=2**20)
    for kind, seconds in (("whole", 0.05), ("again", 0.05), ("sharded", sharded)):
        turns.seconds[kind] = turns.processor[kind] = [seconds] * 3
    turns.compute, turns.gather = [[0.008] * blocks] * 3, [[gather] * blocks] * 3
    return Slowdown(model="unet", side=64, ranks=2, turns=[turns, turns])


def test_a_core_that_computes_also_gathers() -> None:
    """1 ms for each of four blocks is 8 % of the call, although each block computes eight times as long."""
    found = measured(4, gather=0.001, sharded=0.055)
    assert found.is_hidden
    assert found.beside == 1.0
    assert found.in_turn == pytest.approx(1.08)
    assert "| yes | 0.050 | 0.055 | 1.100 (1.000) | 1.000 | 1.080 | 1.100 (1.000) |" in found.row()


def test_gathers_longer_than_blocks_are_hidden_by_neither_law() -> None:
    found = measured(4, gather=0.01, sharded=0.07)
    assert not found.is_hidden
    assert found.beside == pytest.approx(1 + 4 * 0.002 / 0.05)
    assert found.in_turn == pytest.approx(1 + 4 * 0.01 / 0.05)


def test_a_block_whose_slot_is_in_use_is_gathered_in_turn() -> None:
    """Of five blocks the first and the last have one slot."""
    assert measured(5, gather=0.001, sharded=0.055).beside == pytest.approx(1 + 0.001 / 0.05)
