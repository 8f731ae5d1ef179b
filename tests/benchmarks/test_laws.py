"""The laws of passes are what clocks of ranks give, event by event, and what is timed computes the right outputs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.weights.formulas import PipedCase, ShardedCase, StageCase, pass_of
from benchmarks.weights.sleeping import BLOCKS


def passes(compute: list[float], gather: list[float], slots: int, count: int) -> float:
    """When so many passes end, by the clock of one rank: a gather begins when the block before it does."""
    now, arrives = 0.0, 0.0
    blocks = len(compute)
    for number in range(count * blocks):
        block, following = number % blocks, (number + 1) % blocks
        begins = max(now, arrives)
        now = begins + compute[block]
        arrives = (now if following % slots == block % slots else begins) + gather[following]
    return max(now, arrives)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("blocks", [4, 5, 6])
def test_passes_of_blocks_in_slots(slots: int, blocks: int) -> None:
    compute = [0.03 + 0.02 * (number % 3) for number in range(blocks)]
    gather = [0.02 + 0.05 * (number % 2) for number in range(blocks)]
    found = passes(compute, gather, slots, 5) - passes(compute, gather, slots, 2)
    assert found == pytest.approx(3 * pass_of(compute, gather, slots))


def ends(case: PipedCase) -> float:
    """When the last piece of the last step has passed all stages, and its prediction has arrived."""
    piece, prediction = case.of_stage / case.pieces, case.latency + case.prediction_bytes / case.pieces / case.rate
    free, arrived = [0.0] * case.stages, [0.0] * case.pieces
    for _ in range(case.steps):
        for number in range(case.pieces):
            ready = arrived[number]
            for stage in range(case.stages):
                free[stage] = max(free[stage], ready) + piece
                ready = free[stage] + case.hand_over
            arrived[number] = ready - case.hand_over + prediction
    return max(arrived)


@pytest.mark.parametrize("hand_over", [0.0, 0.02, 0.2])
@pytest.mark.parametrize(("stages", "pieces"), [(2, 2), (2, 3), (2, 4), (4, 4), (4, 5), (4, 6)])
def test_pieces_that_pass_through_stages(stages: int, pieces: int, hand_over: float) -> None:
    case = PipedCase(
        **{"stages": stages, "pieces": pieces, "seconds": 0.3, "hand_over": hand_over, "num_bytes": 1200},
        **{"prediction_bytes": 600, "blocks": 8, "steps": 5},
    )
    assert case.law == pytest.approx(ends(case))


RUN = "tests.benchmarks.laws_on_ranks:run"


@pytest.mark.breadth
def test_sharded_blocks_that_sleep_are_those_of_one_rank(ranks: Any) -> None:
    """And each rank sends its parts to all others once in a pass."""
    case = ShardedCase(ranks=2, blocks=((0.001, 4096),) * 4, latency=0.001, rate=math.inf)
    found = ranks.run(RUN, 2, "sharded", case)
    assert [each.is_right for each in found] == [True] * 2
    assert [each.sent for each in found] == [{"weights": 4 * 2048}] * 2


@pytest.mark.breadth
@pytest.mark.parametrize(("part", "kind", "more"), [("stages", StageCase, {}), ("piped", PipedCase, {"pieces": 3})])
def test_stages_that_sleep_are_those_of_one_rank(ranks: Any, part: str, kind: Any, more: dict[str, int]) -> None:
    """Tokens are sent to the next stage, and predictions from the last."""
    sizes = {"num_bytes": 120 * 64 * 4, "prediction_bytes": 120 * 32 * 4, "blocks": BLOCKS}
    case = kind(stages=2, seconds=0.002, hand_over=0.002, **sizes, **more)
    first, last = ranks.run(RUN, 2, part, case)
    assert first.is_right
    assert last.is_right
    assert (first.sent, last.sent) == ({"stage": case.num_bytes}, {"prediction": case.prediction_bytes})
    assert (first.blocks, last.blocks) == (BLOCKS // 2, BLOCKS // 2)
    assert first.seconds >= 0.9 * case.law
