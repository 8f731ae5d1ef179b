"""Every step has one stage, in order, on ranks of its own; what cannot be is refused with the way out."""

from __future__ import annotations

import pytest

from patchpar.errors import PlanError
from patchpar.plan.stream_plan import StreamPlan, plans


@pytest.mark.parametrize(
    ("steps", "ranks", "diagram"),
    [
        (4, 1, "4 steps on 1 rank (rank 0: steps 0-3, decode)"),
        (4, 2, "4 steps on 2 ranks (rank 0: steps 0-1; rank 1: steps 2-3, decode)"),
        (4, 3, "4 steps on 3 ranks (rank 0: steps 0-1; rank 1: step 2; rank 2: step 3, decode)"),
        (2, 2, "2 steps on 2 ranks (rank 0: step 0; rank 1: step 1, decode)"),
        (2, 3, "2 steps on 3 ranks (rank 0: step 0; rank 1: step 1; rank 2: decode)"),
        (2, 5, "2 steps on 5 ranks (ranks 0-1: step 0; ranks 2-3: step 1; rank 4: decode)"),
    ],
)
def test_an_even_plan(steps: int, ranks: int, diagram: str) -> None:
    plan = StreamPlan.even(steps, ranks)
    assert str(plan) == diagram
    assert (plan.steps, plan.ranks) == (steps, ranks)


@pytest.mark.parametrize(
    ("steps", "devices", "inner", "diagram"),
    [
        (2, 2, 1, "2 steps on 2 ranks (rank 0: step 0; rank 1: step 1, decode)"),
        (2, 9, 1, "2 steps on 3 ranks (rank 0: step 0; rank 1: step 1; rank 2: decode)"),
        (2, 4, 2, "2 steps on 4 ranks (ranks 0-1: step 0; ranks 2-3: step 1, decode)"),
        (2, 9, 2, "2 steps on 5 ranks (ranks 0-1: step 0; ranks 2-3: step 1; rank 4: decode)"),
        (1, 3, 2, "1 step on 3 ranks (ranks 0-1: step 0; rank 2: decode)"),
    ],
)
def test_a_plan_for_devices(steps: int, devices: int, inner: int, diagram: str) -> None:
    """Steps are shared by no more ranks than is asked for, however many devices there are."""
    assert str(StreamPlan.on_devices(steps, devices, inner=inner)) == diagram


@pytest.mark.parametrize("plan", list(plans(5, 12)), ids=str)
def test_every_step_and_rank_once(plan: StreamPlan) -> None:
    stages = plan.stages
    assert [step for stage in stages for step in stage.steps] == list(range(5))
    assert [rank for stage in stages for rank in stage.ranks] == list(range(plan.ranks))
    assert [stage.decodes for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert [plan.stage_of(rank) for rank in range(plan.ranks)] == [
        number for number, stage in enumerate(stages) for _ in stage.ranks
    ]


def test_all_plans_differ() -> None:
    found = list(plans(4, 9))
    assert len(set(found)) == len(found)
    assert max(plan.ranks for plan in found) == 9
    assert {StreamPlan.even(4, ranks) for ranks in (1, 2, 3, 4, 5, 9)} <= set(found)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreamPlan(sizes=()), "at least one stage"),
        (lambda: StreamPlan(sizes=(2, 0)), "at least one step"),
        (lambda: StreamPlan(sizes=(1,), decode="host"), "'own' or 'last'"),  # type: ignore[arg-type]
        (lambda: StreamPlan(sizes=(2, 1), inner=2), "one step per stage"),
        (lambda: StreamPlan(sizes=(1, 1), inner=0), "at least 1"),
        (lambda: StreamPlan.even(4, 7), "6 of them cannot be divided evenly among 4 steps, as 1 decodes; use 5 or 9$"),
        (lambda: StreamPlan.even(2, 4), "use 3 or 5, or decode='last'"),
        (lambda: StreamPlan.even(2, 5, decode="last"), "use 4 or 6, or decode='own'"),
        (lambda: StreamPlan.even(4, 1, decode="own"), "use at least 2 ranks"),
        (lambda: StreamPlan.even(0, 1), "at least 1 of each"),
        (
            lambda: StreamPlan.on_devices(2, 3, inner=2),
            "inner=2: for this each step needs 2 devices, 4 in all, and there are 3",
        ),
        (lambda: StreamPlan.on_devices(1, 1, inner=0), "inner=0: it must be"),
        (lambda: StreamPlan.even(2, 3).stage_of(3), "ranks 0 to 2"),
    ],
)
def test_what_cannot_be(make: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()  # type: ignore[operator]
