"""Later steps are those that were recorded last: where a strategy refreshes layers in turn, all of a turn."""

from __future__ import annotations

import pytest

from patchpar.pipeline.planner.forecast import Forecast, PlanForecasts, steps_of_turn
from patchpar.pipeline.planner.image_ranks import ranks_of_image
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.simulate import EXACT_STEPS, STALE_STEPS, SimulatedSteps
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.tape import Boundary, Operator, Send, TapeEntry, Wait

BYTES = 10**9


def recorded(rank: int, steps: int) -> RecordedRank:
    """Every second step computes and sends twice as much as the others, the first, which is exact, ten times."""
    tape: list[TapeEntry] = []
    for step in range(steps):
        factor = (1 + step % 2) if step else 10
        tape += [
            Boundary(f"step {step}", is_step=True),
            Operator("mm", "float16", factor * 10**12, factor * BYTES, (1024, 1024, factor * 476837)),
            Send(step, (1 - rank,), "kv", factor * BYTES, "attn"),
            Wait(step, 1 - rank, factor * BYTES, "attn", "kv"),
        ]
    tape.append(Boundary("decode", is_step=True))
    sizes = {"denoise": 1}
    return RecordedRank(rank=rank, tape=tuple(tape), peaks=sizes, working=sizes, weight_bytes={"unet": 1})


def forecast(turn: int, steps: int = 5) -> Forecast:
    plan = Plan(patch=2, strategy=f"fresh-edges:context=partials,refresh={turn}")
    ranks = ranks_of_image(plan, lambda rank: recorded(rank, steps))
    return PlanForecasts(ranks, plan, Machine.parse("2xH100"), steps=9, warm_up_steps=1).on()


def test_a_later_step_is_the_mean_of_a_turn() -> None:
    """Control: the last step alone has less of everything."""
    found, last = forecast(turn=2), forecast(turn=1)
    steps = [found.phases[f"step {number}"] for number in (3, 4)]
    assert found.step.seconds == pytest.approx(sum(each.seconds for each in steps) / 2)
    assert found.step.seconds == pytest.approx(found.step.compute + found.step.launch + found.step.exposed["kv"])
    assert found.step.seconds > 1.3 * last.step.seconds
    assert [sent["kv"] for sent in found.bytes_sent] == [1.5 * BYTES] * 2
    assert [sent["kv"] for sent in last.bytes_sent] == [BYTES] * 2
    assert list(found.flops) == [1.5e12] * 2
    assert found.seconds == pytest.approx(found.first.seconds + 8 * found.step.seconds + found.phases["decode"].seconds)


def test_the_first_step_is_no_later_one_where_a_call_has_fewer_steps_than_a_turn() -> None:
    assert [sent["kv"] for sent in forecast(turn=4, steps=3).bytes_sent] == [1.5 * BYTES] * 2
    assert [sent["kv"] for sent in forecast(turn=4, steps=1).bytes_sent] == [10 * BYTES] * 2


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        ("patch=2,strategy=fresh-edges:context=partials,refresh=3", 3),
        ("patch=2,strategy=fresh-edges", 1),
        ("patch=2,strategy=displaced", 1),
        ("strategy=fresh-edges:context=partials", None),
        ("patch=2", None),
    ],
)
def test_a_turn_of_cached_partials_is_recorded_whole(plan: str, steps: int | None) -> None:
    """Else the layers that the fourth step refreshes would stand for all."""
    found = SimulatedSteps.of(Plan.parse(plan))
    assert found.recorded == (EXACT_STEPS if steps is None else STALE_STEPS - 1 + steps)
    assert steps_of_turn(Plan.parse(plan)) == (steps or 1)
