"""The simulator obeys the law, and reproduces what was published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.stream.budget import onset
from patchpar.errors import PlanError
from patchpar.plan.stream_plan import StreamPlan, plans
from patchpar.plan.stream_simulation import (
    StreamCosts,
    StreamForecast,
    best_plan,
    law,
    simulate,
    stage_seconds,
    step_seconds,
)

LIVE_AVATAR = StreamCosts(step=12 / 45.2, decode=0.150, frames=12)
"""Live Avatar (arXiv:2512.04677v5), table 3: 45.2 frames/s in blocks of 12; decoding a block takes about 0.15 s."""


@pytest.mark.parametrize(("steps", "first_frame"), [(2, 0.68), (3, 0.95), (4, 1.21)])
def test_table_5_of_live_avatar(steps: int, first_frame: float) -> None:
    forecast = simulate(StreamPlan.even(steps, steps + 1), LIVE_AVATAR)
    assert forecast.fps == pytest.approx(45.2, rel=1e-3)
    assert forecast.first_frame == pytest.approx(first_frame, abs=0.01)


@pytest.mark.parametrize("link", [0.0, 0.02, 0.7])
@pytest.mark.parametrize(("step", "decode"), [(0.2, 0.1), (0.1, 0.5), (0.3, 0.3)])
@pytest.mark.parametrize("plan", list(plans(4, 9)), ids=str)
def test_the_law_within_three_per_cent(plan: StreamPlan, step: float, decode: float, link: float) -> None:
    costs = StreamCosts(step=step, decode=decode, frames=12, link=link, exchange=step / 4)
    fps, first = law(plan, costs)
    forecast = simulate(plan, costs, lead=20)
    assert forecast.fps == pytest.approx(fps, rel=0.03)
    assert forecast.first_frame == pytest.approx(first, rel=0.03)


def test_decoding_on_the_last_stage_costs_rate() -> None:
    own, last = (simulate(StreamPlan.even(4, ranks), LIVE_AVATAR).fps for ranks in (5, 4))
    assert own == pytest.approx(45.2, rel=1e-3)
    assert last == pytest.approx(12 / (12 / 45.2 + 0.150), rel=1e-3)


def test_the_slowest_stage_never_rests_and_the_others_do() -> None:
    forecast = simulate(StreamPlan.even(4, 5), LIVE_AVATAR)
    assert forecast.busy[:4] == pytest.approx([1.0] * 4)
    assert forecast.busy[4] == pytest.approx(0.150 / (12 / 45.2), abs=1e-3)
    assert forecast.gaps == pytest.approx([12 / 45.2] * 3)


def test_uneven_costs_cost_rate_and_more_credit_does_not_bring_it_back() -> None:
    uneven = StreamCosts(step=12 / 45.2, decode=0.150, frames=12, jitter=0.1)
    plan = StreamPlan.even(4, 5)
    little, much = (simulate(plan, uneven, lead=lead).fps for lead in (1, 3))
    assert 0.85 < little / 45.2 < 0.95
    assert much < 0.95 * 45.2
    assert simulate(plan, uneven, seed=3) == simulate(plan, uneven, seed=3) != simulate(plan, uneven, seed=4)


def test_blocks_come_at_equal_times() -> None:
    assert simulate(StreamPlan.even(4, 5), LIVE_AVATAR).longest_gap == pytest.approx(12 / 45.2)


def test_credit_bounds_what_is_in_flight() -> None:
    slow = StreamCosts(step=0.1, decode=1.0, frames=12)
    plan = StreamPlan.even(4, 5)
    assert [simulate(plan, slow, lead=lead).in_flight for lead in (0, 1, 4)] == [5, 6, 9]


def test_live_audio_sets_the_pace() -> None:
    live = StreamCosts(step=0.1, decode=0.1, frames=12, source=0.48)
    forecast = simulate(StreamPlan.even(4, 5), live)
    assert forecast.fps == pytest.approx(25)
    assert forecast.first_frame == pytest.approx(0.5)


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_from_audio_to_image(ranks: int) -> None:
    """The budget is what the simulator finds: a block of sound, and then the time to its first frame."""
    plan = StreamPlan.even(4, ranks)
    live = StreamCosts(step=0.1, decode=0.05, frames=12, link=0.01, source=0.48)
    budget = onset(plan, live)
    assert budget.seconds == pytest.approx(0.48 + simulate(plan, live).first_frame)
    assert budget.steps == pytest.approx(0.4)
    assert str(budget).startswith(f"{budget.seconds:.2f} s from audio to image: 0.48 until a block is full, 0.40 to")


def test_the_clock_waits_for_the_slowest_block() -> None:
    """A block of which all is a fifth slower is shown as late as the budget says."""
    live = StreamCosts(step=0.1, decode=0.05, frames=12, source=0.48)
    slow = StreamCosts(step=0.12, decode=0.06, frames=12, source=0.48)
    plan = StreamPlan.even(4, 5)
    budget = onset(plan, live, spread=0.2)
    assert budget.buffer == pytest.approx(0.2 * 0.45)
    assert budget.seconds == pytest.approx(onset(plan, slow).seconds)
    assert str(budget).endswith("0.09 for jitter")


def test_stages_that_cannot_keep_pace_have_no_budget() -> None:
    slow = StreamCosts(step=0.3, decode=0.05, frames=12, source=0.48)
    with pytest.raises(PlanError, match=r"slowest stage takes 0\.65 s for a block of 0\.48 s"):
        onset(StreamPlan.even(4, 2), slow)
    with pytest.raises(PlanError, match="source=0"):
        onset(StreamPlan.even(4, 2), LIVE_AVATAR)


def test_ranks_that_share_a_step() -> None:
    """Each computes its part, and sends what of it the others need."""
    costs = StreamCosts(step=1.0, decode=0.1, frames=12, exchange=0.8)
    seconds = [stage_seconds(StreamPlan(sizes=(1,), inner=inner), costs)[0] for inner in (1, 2, 3, 4)]
    assert seconds == pytest.approx([1, 0.7, 1 / 3 + 0.8 * 2 / 9, 0.4])
    with pytest.raises(PlanError, match="2 ranks share each step: exchange= is missing"):
        stage_seconds(StreamPlan(sizes=(1,), inner=2), LIVE_AVATAR)


def test_two_ranks_of_live_avatar_that_share_a_step_send_more_than_they_gain() -> None:
    """1.38 GB each way for a step of 14 billion weights at 720 x 400: as fast as one rank over 10 GB/s."""
    tokens, layers, width, bf16 = 3 * 45 * 25, 40, 5120, 2
    whole = layers * 4 * tokens * width * bf16
    assert whole / 4 == pytest.approx(1.38e9, rel=0.01)
    slow, fast = (step_seconds(2, replace(LIVE_AVATAR, exchange=whole / rate)) for rate in (10e9, 200e9))
    assert slow > LIVE_AVATAR.step
    assert fast == pytest.approx(0.53 * LIVE_AVATAR.step, rel=0.01)


def test_the_best_plan() -> None:
    ranks = 9
    assert best_plan(4, ranks, replace(LIVE_AVATAR, exchange=0.05)).inner == 2
    alone = StreamCosts(step=0.265, decode=0.150, frames=12)
    for costs in (alone, replace(alone, exchange=1.0)):
        assert best_plan(4, ranks, costs) == StreamPlan.even(4, 5)
    assert best_plan(4, ranks, alone, fps=100) == StreamPlan.even(4, 5)
    assert law(best_plan(4, 3, alone, fps=45), alone)[0] == pytest.approx(12 / (2 * 0.265))


def test_it_can_be_read() -> None:
    forecast = StreamForecast(
        fps=45.2, first_frame=1.21, gaps=(0.2, 0.3, 0.4), longest_gap=1, busy=(1.0, 0.5), in_flight=3
    )
    assert str(forecast) == (
        "45.2 frames/s, first frame after 1.21 s; ms between blocks (p50, p95, p99): 200, 300, 400; "
        "stages busy: 100%, 50%; at most 3 blocks in flight"
    )


def test_what_cannot_be() -> None:
    with pytest.raises(PlanError, match="at least 0"):
        StreamCosts(step=-1, decode=1, frames=1)
    for cost in (float("nan"), float("inf")):
        with pytest.raises(PlanError, match="at most 1e"):
            StreamCosts(step=cost, decode=1, frames=1)
    with pytest.raises(PlanError, match="lead=20, needs at least 27 blocks"):
        simulate(StreamPlan.even(4, 5), LIVE_AVATAR, blocks=20, lead=20)
    with pytest.raises(PlanError, match="frames=0"):
        StreamCosts(step=1, decode=1, frames=0)
    with pytest.raises(PlanError, match="at least 20 blocks"):
        simulate(StreamPlan.even(4, 5), LIVE_AVATAR, blocks=10)
