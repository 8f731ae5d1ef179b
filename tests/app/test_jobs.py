"""Pages wait in line, see only their own job, find it after a reload, and leave nothing behind when they go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app import jobs
from app.jobs import Job, JobQueue, JobView
from app.visits import PageSessions
from app.watching import looked_at
from patchpar import PlanError, WorkerDied

from .waiting import over, until


@pytest.fixture
def desk() -> Iterator[JobQueue]:
    found = JobQueue(most_waiting=2, grace=0.2)
    yield found
    found.close()


class Slow:
    """Work that ends when it is told to, or cancelled."""

    def __init__(self, result: Any = None) -> None:
        self.go, self.started, self.result = threading.Event(), threading.Event(), result

    def __call__(self, job: Job) -> Any:
        self.started.set()
        while not self.go.wait(0.01):
            job.check()
        return self.result


def test_jobs_run_one_after_another_and_know_how_many_are_ahead(desk: JobQueue) -> None:
    first, second = Slow("a"), Slow("b")
    one, two = desk.submit("A", "image", first), desk.submit("B", "image", second)
    assert first.started.wait(10)
    assert (one.view.state, two.view.state, two.view.ahead) == ("running", "waiting", 1)
    assert not second.started.is_set()
    first.go.set()
    assert second.started.wait(10)
    second.go.set()
    assert (over(one).result, over(two).result) == ("a", "b")


def test_a_page_sees_its_own_results_only(desk: JobQueue) -> None:
    for owner in "AB":
        over(desk.submit(owner, "image", lambda job, owner=owner: f"of {owner}"))
        desk.keep(owner, "run", owner)
    views = {owner: job.view.result for owner in "AB" if (job := desk.job_of(owner, "image")) is not None}
    assert views == {"A": "of A", "B": "of B"}
    assert (desk.kept("A", "run"), desk.kept("B", "run"), desk.kept("C", "run")) == ("A", "B", None)
    assert desk.job_of("C", "image") is None


def test_a_page_has_one_job_at_a_time(desk: JobQueue) -> None:
    work = Slow()
    desk.submit("A", "image", work)
    with pytest.raises(PlanError, match="a job under way: wait for it, or cancel it"):
        desk.submit("A", "compare", Slow())


def test_a_full_line_is_told_at_once(desk: JobQueue) -> None:
    running = Slow()
    desk.submit("A", "image", running)
    assert running.started.wait(10)
    waiting = desk.submit("B", "image", Slow())
    desk.submit("C", "image", Slow())
    with pytest.raises(PlanError, match="2 jobs are waiting, which is all there is room for"):
        desk.submit("D", "image", Slow())
    waiting.cancel()
    desk.submit("D", "image", Slow())


def test_cancelling_ends_one_job_and_frees_the_workers(desk: JobQueue) -> None:
    work = Slow()
    job = desk.submit("A", "image", work)
    assert work.started.wait(10)
    desk.cancel("A")
    assert over(job).state == "cancelled"
    assert over(desk.submit("A", "image", lambda job: "next")).result == "next"


def test_a_job_that_waits_is_cancelled_without_being_begun(desk: JobQueue) -> None:
    running, waiting = Slow(), Slow()
    desk.submit("A", "image", running)
    job = desk.submit("B", "image", waiting)
    desk.cancel("B")
    assert job.view.state == "cancelled"
    running.go.set()
    assert over(desk.submit("C", "image", lambda job: 1)).result == 1
    assert not waiting.started.is_set()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PlanError("height=7: use 8"), "height=7: use 8"),
        (ValueError("no"), "ValueError: no"),
        (
            WorkerDied("rank 1 died.\nTraceback (most recent call last):\n  File x"),
            "rank 1 died. The workers are started again with the next job: try once more.",
        ),
    ],
)
def test_an_error_is_a_sentence_and_the_desk_goes_on(desk: JobQueue, error: Exception, said: str) -> None:
    def work(job: Job) -> None:
        raise error

    view = over(desk.submit("A", "image", work))
    assert (view.state, view.error) == ("failed", said)
    assert over(desk.submit("A", "image", lambda job: 2)).result == 2


def test_a_page_that_does_not_come_back_leaves_no_job(desk: JobQueue) -> None:
    visits, work = PageSessions(desk), Slow()
    owner = visits.arrive("session 1", "a" * 32)
    job = desk.submit(owner, "image", work)
    assert work.started.wait(10)
    visits.leave("session 1")
    assert over(job).state == "cancelled"


@pytest.mark.parametrize("is_late", [False, True], ids=["left, then back", "back, then left"])
def test_a_page_that_is_reloaded_finds_its_job(desk: JobQueue, is_late: bool) -> None:
    """The old connection may end before or after the new one begins."""
    visits, work = PageSessions(desk), Slow("kept")
    owner = visits.arrive("session 1", "b" * 32)
    job = desk.submit(owner, "image", work)
    steps: list[Callable[[], Any]] = [lambda: visits.leave("session 1"), lambda: visits.arrive("session 2", owner)]
    for step in reversed(steps) if is_late else steps:
        step()
    threading.Event().wait(0.4)  # twice the grace
    assert job.view.state == "running"
    work.go.set()
    assert over(job).result == "kept"
    assert desk.job_of(owner, "image") is job


def test_it_can_leave_more_than_once(desk: JobQueue) -> None:
    visits = PageSessions(desk)
    for session in "12":
        owner, work = visits.arrive(session, "c" * 32), Slow()
        job = desk.submit(owner, "image", work)
        assert work.started.wait(10)
        visits.leave(session)
        assert over(job).state == "cancelled"


def test_a_name_that_is_none_is_replaced(desk: JobQueue) -> None:
    visits = PageSessions(desk)
    names = {visits.arrive(str(number), bad) for number, bad in enumerate(["", "x", "../..", "A" * 32])}
    assert len(names) == 4
    assert all(len(name) == 32 for name in names)


def test_what_is_remembered_is_bounded(desk: JobQueue) -> None:
    for number in range(3 * jobs.KEPT):
        over(desk.submit(str(number), "image", lambda job, number=number: number))
    assert len(desk._pages) <= jobs.KEPT + 1
    assert desk.job_of(str(3 * jobs.KEPT - 1), "image") is not None
    assert desk.job_of("0", "image") is None


def test_closing_ends_what_runs_and_what_waits() -> None:
    desk, work = JobQueue(), Slow()
    running, waiting = desk.submit("A", "image", work), desk.submit("B", "image", Slow())
    assert work.started.wait(10)
    desk.close()
    assert (running.view.state, waiting.view.state) == ("cancelled", "cancelled")
    with pytest.raises(PlanError, match="closing"):
        desk.submit("A", "image", work)
    desk.close()


def test_a_page_is_shown_every_change_until_the_end(desk: JobQueue) -> None:
    def work(job: Job) -> str:
        for step in (1, 2):
            job.show(step=step, steps=2)
            until(lambda step=step: any(view.step == step for view in seen), "the page to look")
        return "done"

    seen: list[JobView] = []

    async def look() -> None:
        async for view in looked_at(desk.submit("A", "image", work), lambda view: view):
            seen.append(view)

    asyncio.run(asyncio.wait_for(look(), 30))
    assert [view.step for view in seen if view.state == "running" and view.step] == [1, 2]
    assert (seen[-1].state, seen[-1].result) == ("done", "done")


def test_without_a_job_there_is_one_look() -> None:
    async def look() -> list[Any]:
        return [shown async for shown in looked_at(None, lambda view: view)]

    assert asyncio.run(look()) == [None]
