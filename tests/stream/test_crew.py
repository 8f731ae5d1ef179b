"""Ranks that die are started again; those that cannot be had again, or die at once, are done without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchpar.errors import LaunchError, WorkerDied
from patchpar.stream.crew import Crew, fewer
from patchpar.stream.plan import StreamPlan
from patchpar.stream.talk import Cancel, Course, Produced

COURSE = Course(ranks=3, seed=0, rows=4, columns=6, first_block=0, adapt_sink=True)
PRODUCED = Produced(block=0, frames=torch.zeros(1), seconds=0.1, sink=None)
Act = Callable[[Any, Any], list[Any]]


class Ranks:
    """Does at each call what the next of `acts` does."""

    def __init__(self, *acts: Act) -> None:
        self.acts, self.closed = list(acts), False

    def call(self, method: str, course: Course, *, on_event: Any, on_start: Any) -> list[Any]:
        return self.acts.pop(0)(on_event, on_start)

    def close(self) -> None:
        self.closed = True


def works(on_event: Any, on_start: Any) -> list[Any]:
    on_event(0, PRODUCED)
    return ["done"]


def dies(on_event: Any, on_start: Any) -> list[Any]:
    raise WorkerDied("rank 1 was killed")


def dies_later(on_event: Any, on_start: Any) -> list[Any]:
    on_event(0, PRODUCED)
    raise WorkerDied("rank 1 was killed")


def cannot_start(on_event: Any, on_start: Any) -> list[Any]:
    raise LaunchError("no memory")


def run(crew: Crew) -> Any:
    return crew.run(COURSE, lambda rank, event: None, lambda tell: None)


def crew(first: Ranks, *others: Any) -> tuple[Crew, list[StreamPlan]]:
    left, plans = list(others), []

    def start(plan: StreamPlan) -> Any:
        plans.append(plan)
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found, None

    return Crew(first, StreamPlan.even(2, 3), start), plans  # type: ignore[arg-type]


def test_the_same_ranks_while_they_get_on() -> None:
    """However often one dies, as long as blocks come out in between."""
    one, plans = crew(Ranks(dies_later, dies_later, dies_later, works))
    for _ in range(3):
        with pytest.raises(WorkerDied):
            run(one)
    assert run(one) == ["done"]
    assert (plans, one.plan) == ([], StreamPlan.even(2, 3))


def test_fewer_when_they_die_without_a_block(caplog: pytest.LogCaptureFixture) -> None:
    first = Ranks(dies, dies)
    one, plans = crew(first, Ranks(works))
    for _ in range(2):
        with pytest.raises(WorkerDied):
            run(one)
    with caplog.at_level(logging.WARNING):
        assert run(one) == ["done"]
    assert first.closed
    assert plans == [one.plan] == [StreamPlan.even(2, 2)]
    assert "3 ranks cannot be had any more; the stream goes on with 2 steps on 2 ranks" in caplog.text


def test_fewer_and_fewer_when_they_cannot_be_started() -> None:
    one, plans = crew(Ranks(cannot_start), LaunchError("still none"), Ranks(works))
    assert run(one) == ["done"]
    assert [plan.ranks for plan in plans] == [2, 1]
    assert one.plan.ranks == 1


def test_the_end_of_the_way() -> None:
    one, plans = crew(Ranks(cannot_start), LaunchError("a"), LaunchError("the last"))
    with pytest.raises(LaunchError, match="the last"):
        run(one)
    assert len(plans) == 2
    with pytest.raises(LaunchError, match="no memory"):
        run(Crew(Ranks(cannot_start), StreamPlan.even(2, 3)))  # type: ignore[arg-type]


def test_after_the_pipeline_is_closed_nothing_starts() -> None:
    one, plans = crew(Ranks(cannot_start), Ranks(works))
    one.close()
    with pytest.raises(LaunchError, match="no memory"):
        run(one)
    assert plans == []


def test_ranks_that_are_gone_are_not_spoken_to() -> None:
    told: list[int] = []

    def tells(on_event: Any, on_start: Any) -> list[Any]:
        on_start(lambda rank, value: told.append(rank))
        return []

    one, _ = crew(Ranks(cannot_start), Ranks(tells))

    def begun(tell: Any) -> None:
        for rank in range(COURSE.ranks):
            tell(rank, Cancel())

    one.run(COURSE, lambda rank, event: None, begun)
    assert told == [0, 1]


@pytest.mark.parametrize(("ranks", "left"), [(5, 3), (3, 2), (2, 1), (1, None)])
def test_the_next_smaller_plan_there_is(ranks: int, left: int | None) -> None:
    plan = fewer(StreamPlan.even(2, ranks))
    assert (None if plan is None else plan.ranks) == left
