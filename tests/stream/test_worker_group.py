"""Ranks that die are started again; a device that cannot be had again, or dies at once, is done without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from patchpar.errors import LaunchError, WorkerDied, WorkerError
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream import worker_group
from patchpar.stream.messages import CancelStream, ProducedBlock, StreamRun
from patchpar.stream.worker_group import WorkerGroup, start_ranks, within

COURSE = StreamRun(ranks=3, seed=0, rows=4, columns=6, first_block=0, adapt_sink=True)
PRODUCED = ProducedBlock(block=0, frames=torch.zeros(1), seconds=0.1, sink=None)
Act = Callable[[Any, Any], list[Any]]


class Ranks:
    """Does at each call what the next of `acts` does."""

    def __init__(self, *acts: Act) -> None:
        self.acts, self.closed = list(acts), False

    def call(self, method: str, course: StreamRun, *, on_event: Any, on_start: Any) -> list[Any]:
        return self.acts.pop(0)(on_event, on_start)

    def close(self) -> None:
        self.closed = True


def works(on_event: Any, on_start: Any) -> list[Any]:
    on_event(0, PRODUCED)
    return ["done"]


def killed(rank: int) -> Act:
    def act(on_event: Any, on_start: Any) -> list[Any]:
        raise WorkerDied(f"rank {rank} was killed", rank=rank)

    return act


dies = killed(1)


def dies_later(on_event: Any, on_start: Any) -> list[Any]:
    on_event(0, PRODUCED)
    raise WorkerDied("rank 1 was killed")


def cannot_start(on_event: Any, on_start: Any) -> list[Any]:
    raise LaunchError("no memory")


def cannot_start_the_first(on_event: Any, on_start: Any) -> list[Any]:
    raise LaunchError("no memory") from WorkerError("rank 0 raised", rank=0)


def test_a_model_may_take_an_hour_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an image pipeline, before ranks that use no processor meanwhile count as hung."""
    found: list[float] = []

    class Loading:
        def __init__(self, *_: Any, **options: Any) -> None: ...

        def call(self, *_: Any, replay: bool, expected: float) -> list[str]:
            found.append(expected)
            return ["a model"]

    for name in ("InlineExecutor", "LocalExecutor"):
        monkeypatch.setattr(worker_group, name, Loading)
    for devices in (["cpu"], ["cpu", "cpu"]):
        assert start_ranks(devices, "engine:Engine", 60.0, ())[1] == "a model"
    assert found == [3600.0, 3600.0]


def run(group: WorkerGroup) -> Any:
    return group.run(COURSE, lambda rank, event: None, lambda report: None)


class Starting:
    """Gives `others` in turn, or raises them, and remembers what was asked for."""

    def __init__(self, devices: str, *others: Any) -> None:
        self.devices, self.others = tuple(devices), list(others)
        self.plans: list[StreamPlan] = []
        self.used: list[str] = []

    def start(self, plan: StreamPlan, devices: Sequence[str]) -> Any:
        self.plans.append(plan)
        self.used.append("".join(devices[: plan.ranks]))
        found = self.others.pop(0)
        if isinstance(found, Exception):
            raise found
        return found, None


def group(first: Ranks, *others: Any, devices: str = "abc") -> tuple[WorkerGroup, Starting]:
    starting = Starting(devices, *others)
    return WorkerGroup(first, StreamPlan.even(2, 3), starting), starting  # type: ignore[arg-type]


def test_the_same_ranks_while_they_get_on() -> None:
    """However often one dies, as long as blocks come out in between."""
    one, asked = group(Ranks(dies_later, dies_later, dies_later, works))
    for _ in range(3):
        with pytest.raises(WorkerDied):
            run(one)
    assert run(one) == ["done"]
    assert (asked.plans, one.plan) == ([], StreamPlan.even(2, 3))


def test_without_the_device_whose_rank_dies_without_a_block(caplog: pytest.LogCaptureFixture) -> None:
    """Not without the last one: that is as good as the others."""
    first = Ranks(dies, dies)
    one, asked = group(first, Ranks(works))
    for _ in range(2):
        with pytest.raises(WorkerDied):
            run(one)
    with caplog.at_level(logging.WARNING):
        assert run(one) == ["done"]
    assert first.closed
    assert asked.plans == [one.plan] == [StreamPlan.even(2, 2)]
    assert asked.used == ["ac"]
    assert "device b has failed; the stream continues with 2 steps on 2 ranks" in caplog.text


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (0, 1, 2)])
def test_deaths_of_different_ranks_are_no_failed_device(ranks: tuple[int, ...]) -> None:
    """Each of them once without a block."""
    one, asked = group(Ranks(*map(killed, ranks), works))
    for _ in ranks:
        with pytest.raises(WorkerDied):
            run(one)
    assert run(one) == ["done"]
    assert (asked.plans, one.plan) == ([], StreamPlan.even(2, 3))


def test_without_the_device_whose_rank_dies_twice_among_others() -> None:
    """The deaths of a rank are counted whichever dies between them, and after that no earlier ones."""
    one, asked = group(Ranks(killed(2), killed(0), killed(2)), Ranks(killed(0), works))
    for _ in range(4):
        with pytest.raises(WorkerDied):
            run(one)
    assert run(one) == ["done"]
    assert asked.used == ["ab"]


def test_what_a_rank_raises_is_no_fault_of_its_device() -> None:
    """However often: a stream that is wrong is wrong on any device."""

    def raises(on_event: Any, on_start: Any) -> list[Any]:
        raise WorkerError("rank 1 raised RuntimeError: sizes differ", rank=1)

    one, asked = group(Ranks(raises, raises, raises, works))
    for _ in range(3):
        with pytest.raises(WorkerError):
            run(one)
    assert run(one) == ["done"]
    assert asked.plans == []


def test_a_device_to_spare_takes_the_place_of_a_dead_one() -> None:
    one, asked = group(Ranks(cannot_start_the_first), Ranks(works), devices="abcd")
    assert run(one) == ["done"]
    assert (asked.plans, asked.used) == ([StreamPlan.even(2, 3)], ["bcd"])


@pytest.mark.parametrize("comes", [True, False])
def test_what_is_closed_meanwhile_is_not_left_running(comes: bool) -> None:
    """By another thread, while ranks are started, which takes minutes. Nor are others started then."""
    late, asked = Ranks(works), Starting("abcd", LaunchError("no memory"), Ranks(works))

    class Slow(Starting):
        def start(self, plan: StreamPlan, devices: Sequence[str]) -> Any:
            one.close()
            return (late, None) if comes else asked.start(plan, devices)

    one = WorkerGroup(Ranks(cannot_start), StreamPlan.even(2, 3), Slow("abcd"))  # type: ignore[arg-type]
    with pytest.raises(LaunchError):
        run(one)
    assert late.closed == comes
    assert len(asked.plans) == (not comes)


def test_fewer_and_fewer_when_they_cannot_be_started() -> None:
    """Without those that are accused; where nobody is, without the last."""
    accused = LaunchError("still none")
    accused.__cause__ = WorkerError("rank 0 raised", rank=0)
    one, asked = group(Ranks(cannot_start), accused, Ranks(works))
    assert run(one) == ["done"]
    assert asked.used == ["ab", "b"]
    assert one.plan.ranks == 1


def test_the_end_of_the_way() -> None:
    one, asked = group(Ranks(cannot_start), LaunchError("a"), LaunchError("the last"))
    with pytest.raises(LaunchError, match="the last"):
        run(one)
    assert asked.used == ["ab", "a"]


def test_after_the_pipeline_is_closed_nothing_starts() -> None:
    one, asked = group(Ranks(cannot_start), Ranks(works))
    one.close()
    with pytest.raises(LaunchError, match="no memory"):
        run(one)
    assert asked.plans == []


def test_ranks_that_are_gone_are_not_spoken_to() -> None:
    reported: list[int] = []

    def reports(on_event: Any, on_start: Any) -> list[Any]:
        on_start(lambda rank, value: reported.append(rank))
        return []

    one, _ = group(Ranks(cannot_start), Ranks(reports))

    def begun(report: Any) -> None:
        for rank in range(COURSE.ranks):
            report(rank, CancelStream())

    one.run(COURSE, lambda rank, event: None, begun)
    assert reported == [0, 1]


@pytest.mark.parametrize(("devices", "left"), [(6, 5), (5, 5), (4, 3), (3, 3), (2, 2), (1, 1), (0, None)])
def test_the_plan_for_the_devices_there_are(devices: int, left: int | None) -> None:
    plan = within(StreamPlan.even(2, 5), devices)
    assert (None if plan is None else plan.ranks) == left
