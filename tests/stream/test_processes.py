"""The same in processes: each rank has its own memory, random state and start-up."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from patchpar.plan.stream_plan import StreamPlan
from tests.breadth import first_of
from tests.ranks import PoolRank
from tests.stream.running import Outcome, Script, differing, serial, stage
from tests.stream.test_stages import EVERYTHING
from tests.stream.tiny import stream


def on_rank(this: PoolRank, steps: int) -> Outcome:
    """The outcome, on the rank that decodes."""
    plan = StreamPlan.even(steps, this.world)
    return stage(this.transport, {this.rank: stream(steps)}, plan, Script(EVERYTHING))[0]


@pytest.mark.parametrize(
    ("steps", "world", "through"),
    first_of(product((3,), (4, 2), ("shared_memory", "torch")), (3, 4, "shared_memory"), (3, 2, "torch")),
)
def test_processes_give_the_bits_of_one(ranks: Any, steps: int, world: int, through: str) -> None:
    *_, outcome = ranks.run("tests.stream.test_processes:on_rank", world, steps, through=through)
    assert differing(outcome, serial(stream(steps), EVERYTHING)) == []
