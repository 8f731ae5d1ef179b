"""Later steps are those that were recorded last: where a strategy refreshes layers in turn, all of a turn."""

from __future__ import annotations

import pytest

from patchpar.pipeline.planner.forecast import Forecast, PlanForecasts
from patchpar.pipeline.planner.image_ranks import ranks_of_image
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.simulate import STALE_STEPS, SimulatedSteps
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.tape import Boundary, Operator, Send, TapeEntry, Wait

PLAN, BYTES = Plan(patch=2), 10**9


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
    ranks = ranks_of_image(PLAN, lambda rank: recorded(rank, steps))
    machine = Machine.parse("2xH100")
    return PlanForecasts(ranks, PLAN, machine, steps=9, warm_up_steps=1, turn=turn).on()


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


def test_a_turn_of_cached_partials_is_recorded_whole() -> None:
    """Else the layers that the fourth step refreshes, of a UNet the widest ones, would stand for all."""
    found = SimulatedSteps.of(Plan.parse("patch=2,strategy=fresh-edges:context=partials,refresh=3"))
    assert (found.recorded, found.turn) == (STALE_STEPS + 2, 3)
    other = SimulatedSteps.of(Plan.parse("patch=2,strategy=fresh-edges"))
    assert (other.recorded, other.turn) == (STALE_STEPS, 1)
