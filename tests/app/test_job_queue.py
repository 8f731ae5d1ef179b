"""Pages wait in line, see only their own job, find it after a reload, and leave nothing behind when they go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.job_queue import MAX_PAGES, Job, JobQueue, JobView
from app.job_updates import updates_of
from app.sessions import PageSessions
from patchpar import PlanError, WorkerDied
from patchpar.serving.job import ServerEnding

from .waits import over, until


@pytest.fixture
def queue() -> Iterator[JobQueue]:
    found = JobQueue(max_waiting=2, grace=0.2)
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


def test_jobs_run_one_after_another_and_know_how_many_are_ahead(queue: JobQueue) -> None:
    first, second = Slow("a"), Slow("b")
    one, two = queue.submit("A", "image", first), queue.submit("B", "image", second)
    assert first.started.wait(10)
    assert (one.view.state, two.view.state, two.view.ahead) == ("running", "waiting", 1)
    assert not second.started.is_set()
    first.go.set()
    assert second.started.wait(10)
    second.go.set()
    assert (over(one).result, over(two).result) == ("a", "b")


def test_a_page_sees_its_own_results_only(queue: JobQueue) -> None:
    for owner in "AB":
        over(queue.submit(owner, "image", lambda job, owner=owner: f"of {owner}"))
        queue.store(owner, "run", owner)
    views = {owner: job.view.result for owner in "AB" if (job := queue.job_of(owner, "image")) is not None}
    assert views == {"A": "of A", "B": "of B"}
    assert (queue.stored("A", "run"), queue.stored("B", "run"), queue.stored("C", "run")) == ("A", "B", None)
    assert queue.job_of("C", "image") is None


def test_a_page_has_one_job_at_a_time(queue: JobQueue) -> None:
    work = Slow()
    queue.submit("A", "image", work)
    with pytest.raises(PlanError, match="already has a job: wait for it, or cancel it"):
        queue.submit("A", "compare", Slow())


def test_a_full_line_is_reported_at_once(queue: JobQueue) -> None:
    running = Slow()
    queue.submit("A", "image", running)
    assert running.started.wait(10)
    waits = queue.submit("B", "image", Slow())
    queue.submit("C", "image", Slow())
    with pytest.raises(PlanError, match="2 jobs are waiting, which is the limit"):
        queue.submit("D", "image", Slow())
    waits.cancel()
    queue.submit("D", "image", Slow())


def test_cancelling_ends_one_job_and_frees_the_workers(queue: JobQueue) -> None:
    work = Slow()
    job = queue.submit("A", "image", work)
    assert work.started.wait(10)
    queue.cancel("A")
    assert over(job).state == "cancelled"
    assert over(queue.submit("A", "image", lambda job: "next")).result == "next"


def test_a_job_that_waits_is_cancelled_without_being_begun(queue: JobQueue) -> None:
    running, waits = Slow(), Slow()
    queue.submit("A", "image", running)
    job = queue.submit("B", "image", waits)
    queue.cancel("B")
    assert job.view.state == "cancelled"
    running.go.set()
    assert over(queue.submit("C", "image", lambda job: 1)).result == 1
    assert not waits.started.is_set()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PlanError("height=7: use 8"), "height=7: use 8"),
        (ValueError("no"), "ValueError: no"),
        (
            WorkerDied("rank 1 died.\nTraceback (most recent call last):\n  File x"),
            "rank 1 died. The workers are started again with the next job: try once more.",
        ),
    ],
)
def test_an_error_is_a_sentence_and_the_queue_goes_on(queue: JobQueue, error: Exception, message: str) -> None:
    def work(job: Job) -> None:
        raise error

    view = over(queue.submit("A", "image", work))
    assert (view.state, view.error) == ("failed", message)
    assert over(queue.submit("A", "image", lambda job: 2)).result == 2


def test_a_page_that_does_not_come_back_leaves_no_job(queue: JobQueue) -> None:
    sessions, work = PageSessions(queue), Slow()
    owner = sessions.connect("session 1", "a" * 32)
    job = queue.submit(owner, "image", work)
    assert work.started.wait(10)
    sessions.disconnect("session 1")
    assert over(job).state == "cancelled"


@pytest.mark.parametrize("is_late", [False, True], ids=["left, then back", "back, then left"])
def test_a_page_that_is_reloaded_finds_its_job(queue: JobQueue, is_late: bool) -> None:
    """The old connection may end before or after the new one begins."""
    sessions, work = PageSessions(queue), Slow("kept")
    owner = sessions.connect("session 1", "b" * 32)
    job = queue.submit(owner, "image", work)
    steps: list[Callable[[], Any]] = [
        lambda: sessions.disconnect("session 1"),
        lambda: sessions.connect("session 2", owner),
    ]
    for step in reversed(steps) if is_late else steps:
        step()
    threading.Event().wait(0.4)  # twice the grace
    assert job.view.state == "running"
    work.go.set()
    assert over(job).result == "kept"
    assert queue.job_of(owner, "image") is job


def test_a_page_that_comes_back_while_it_leaves_has_come_back() -> None:
    """Handlers of both run at the same time, and the last one to reach the queue decides."""
    order, has_come, leaving = list[str](), threading.Event(), threading.Event()

    def left(owner: str) -> None:
        leaving.set()
        has_come.wait(0.5)  # where nothing keeps the new connection from coming first
        order.append("left")

    sessions = PageSessions(SimpleNamespace(page_left=left, page_returned=lambda owner: order.append("came")))  # type: ignore[arg-type]
    owner = sessions.connect("session 1", "d" * 32)
    thread = threading.Thread(target=sessions.disconnect, args=["session 1"])
    thread.start()
    assert leaving.wait(10)
    sessions.connect("session 2", owner)
    has_come.set()
    thread.join(10)
    assert order == ["came", "left", "came"]


def test_it_can_leave_more_than_once(queue: JobQueue) -> None:
    sessions = PageSessions(queue)
    for session in "12":
        owner, work = sessions.connect(session, "c" * 32), Slow()
        job = queue.submit(owner, "image", work)
        assert work.started.wait(10)
        sessions.disconnect(session)
        assert over(job).state == "cancelled"


def test_a_page_that_comes_back_and_leaves_again_has_its_whole_grace(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the first one has ended meanwhile, and waits for the queue."""
    work, has_ended, give_up = Slow("a"), threading.Event(), queue._give_up

    def noted(owner: str) -> None:
        has_ended.set()
        give_up(owner)

    monkeypatch.setattr(queue, "_give_up", noted)
    job = queue.submit("A", "image", work)
    queue.page_left("A")
    first = queue._page("A").leaving
    assert first is not None
    with queue._changed:
        assert has_ended.wait(10)
        queue.page_returned("A")
        queue._grace = 60.0
        queue.page_left("A")
    first.join(10)
    queue.page_returned("A")
    work.go.set()
    assert over(job).state == "done"


def test_a_name_that_is_none_is_replaced(queue: JobQueue) -> None:
    sessions = PageSessions(queue)
    names = {sessions.connect(str(number), bad) for number, bad in enumerate(["", "x", "../..", "A" * 32])}
    assert len(names) == 4
    assert all(len(name) == 32 for name in names)


def test_what_is_remembered_is_bounded(queue: JobQueue) -> None:
    for number in range(3 * MAX_PAGES):
        over(queue.submit(str(number), "image", lambda job, number=number: number))
    assert len(queue._pages) <= MAX_PAGES + 1
    assert queue.job_of(str(3 * MAX_PAGES - 1), "image") is not None
    assert queue.job_of("0", "image") is None


def test_closing_ends_what_runs_and_what_waits() -> None:
    queue, work = JobQueue(), Slow()
    running, waits = queue.submit("A", "image", work), queue.submit("B", "image", Slow())
    assert work.started.wait(10)
    queue.close()
    assert (running.view.state, waits.view.state) == ("cancelled", "cancelled")
    with pytest.raises(PlanError, match="closing"):
        queue.submit("A", "image", work)
    queue.close()


def test_a_page_is_shown_every_change_until_the_end(queue: JobQueue) -> None:
    def work(job: Job) -> str:
        for step in (1, 2):
            job.show(step=step, steps=2)
            until(lambda step=step: any(view.step == step for view in seen), "the page to look")
        return "done"

    seen: list[JobView] = []

    async def look() -> None:
        async for view in updates_of(queue.submit("A", "image", work), lambda view: view):
            seen.append(view)

    asyncio.run(asyncio.wait_for(look(), 30))
    assert [view.step for view in seen if view.state == "running" and view.step] == [1, 2]
    assert (seen[-1].state, seen[-1].result) == ("done", "done")


def first_update(queue: JobQueue, work: Callable[[Job], None]) -> JobView:
    async def first() -> JobView:
        return await anext(updates_of(queue.submit("A", "image", work), lambda view: view))

    return asyncio.run(asyncio.wait_for(first(), 30))


def test_the_first_update_has_the_first_step_and_its_preview(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """One update less while the ranks compute the step."""
    monkeypatch.setattr("app.job_updates.BEGIN_SECONDS", 20.0)
    monkeypatch.setattr("app.job_updates.PREVIEW_SECONDS", 20.0)
    seen = threading.Event()

    def work(job: Job) -> None:
        job.show(note="generating", steps=2)
        job.show(step=1, steps=2)
        job.show(preview="first")
        assert seen.wait(20)

    view = first_update(queue, work)
    seen.set()
    assert (view.state, view.note, view.step, view.preview) == ("running", "generating", 1, "first")


def test_a_long_first_step_is_not_waited_for(queue: JobQueue) -> None:
    seen = threading.Event()

    def work(job: Job) -> None:
        job.show(note="generating", steps=2)
        assert seen.wait(20)

    view = first_update(queue, work)
    seen.set()
    assert (view.state, view.note, view.step) == ("running", "generating", 0)


def test_a_job_behind_another_one_is_shown_at_once(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.job_updates.BEGIN_SECONDS", 40.0)
    seen = threading.Event()
    queue.submit("B", "image", lambda job: seen.wait(40))
    view = first_update(queue, lambda job: None)
    seen.set()
    assert (view.state, view.ahead) == ("waiting", 1)


def test_without_a_job_there_is_one_look() -> None:
    async def look() -> list[Any]:
        return [displayed async for displayed in updates_of(None, lambda view: view)]

    assert asyncio.run(look()) == [None]


def test_a_job_that_goes_on_after_the_end_is_over_for_who_waits_for_it(queue: JobQueue) -> None:
    """One in a call that cannot be ended; what it returns later is nobody's."""
    go, started = threading.Event(), threading.Event()

    def stubborn(job: Job) -> str:
        started.set()
        go.wait(10)
        return "too late"

    job = queue.submit("A", "image", stubborn)
    assert started.wait(10)
    queue.close(0.05)
    assert (job.view.state, type(job.outcome.exception(0))) == ("cancelled", ServerEnding)
    assert not queue.finish(0)
    go.set()
    assert queue.finish(10)
    assert (job.view.state, job.view.result) == ("cancelled", None)
