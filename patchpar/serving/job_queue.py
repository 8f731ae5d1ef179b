"""Jobs before the workers: in order, as many at a time as the workers have room for, observed and cancelled.

    handler --submit--> [ A | B | C ] --threads--> workers
    handler <--view, outcome-- jobs ahead, step, result

Python's ThreadPoolExecutor would be a queue too, but the interpreter waits for its thread on exit, where a call may be
minutes from its next step; it has no limit, and a running job cannot be cancelled.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from patchpar.errors import PlanError
from patchpar.serving.job import Job, ServerEnding

CLOSE_SECONDS = 1.0  # a first call may be minutes from its next step
log = logging.getLogger(__name__)


class QueueFull(PlanError):
    """As many jobs wait as may."""


class QueueClosed(PlanError):
    """The queue takes no more jobs."""


@dataclass(frozen=True, slots=True)
class JobStart:
    """The job to start now, and what it takes of the capacity. `peers`: jobs whose results it makes too."""

    job: Job
    takes: int
    peers: tuple[Job, ...] = ()


@dataclass(frozen=True, slots=True)
class JobSuspend:
    """The job to suspend now, so that another one can start."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobHold:
    """Start nothing for so many seconds, unless a job comes or ends before."""

    seconds: float


Choice = Callable[[int, Sequence[Job], Sequence[Job]], JobStart | JobSuspend | JobHold | None]
"""Chooses the next job by the capacity that is free, the jobs that wait in order, and those that run."""


def in_order(free: int, waiting: Sequence[Job], running: Sequence[Job]) -> JobStart | None:
    """Choose the first job as soon as there is room for it, so that it is never overtaken."""
    first = waiting[0]
    return JobStart(first, first.takes) if first.takes <= free else None


class WorkQueue:
    """Runs jobs, in order or as `choose` says. `close` ends it.

    `capacity`: what jobs that run may take together, such as the number of workers; by default one runs at a time.
    """

    def __init__(self, *, max_waiting: int, capacity: int = 1, choose: Choice = in_order) -> None:
        self._most, self._free, self._capacity = max_waiting, capacity, capacity
        self._changed = threading.Condition(threading.RLock())
        self._choose = choose
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._is_closed = self._is_paused = False
        self._threads = capacity
        self._ended = threading.Event()  # a join that a signal interrupts takes the thread for ended in Python 3.11
        for _ in range(capacity):
            threading.Thread(target=self._serve, name="patchpar-jobs", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Number of jobs that wait."""
        return len(self.jobs[0])

    @property
    def jobs(self) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
        """The jobs that wait, in order, and those that run."""
        with self._changed:
            return tuple(job for job in self._waiting if not job.view.is_over), tuple(self._running)

    def append(
        self,
        work: Callable[[Job], Any],
        *,
        takes: int = 1,
        facts: Any = None,
        source: Any = None,
        kept: Any = None,
        admit: Callable[[Sequence[Job]], object] = lambda _: None,
    ) -> Job:
        """Append a job that takes so much of the capacity. Raises QueueClosed, and QueueFull if too many jobs wait.

        `facts`: what `choose` has to know of it. `source`, `kept`: see Job; one that goes on is never one too many.
        `admit`: see `check_room`.
        """
        with self._changed:
            self._drop_ended()
            if kept is None:
                self.check_room(admit)
            job = Job(work, min(takes, self._capacity), facts=facts, source=source, kept=kept)
            return self._insert(job, len(self._waiting))

    def check_room(self, admit: Callable[[Sequence[Job]], object] = lambda _: None) -> None:
        """Raise QueueClosed, or QueueFull if too many jobs wait for another one.

        `admit` gets the jobs that wait, and raises for one that is not to wait with them.
        """
        with self._changed:
            self.check_open()
            self._drop_ended()
            admit(tuple(self._waiting))
            if len(self._waiting) >= self._most:
                raise QueueFull(f"{len(self._waiting)} jobs are waiting, which is the limit: try later")

    def put_first(self, work: Callable[[Job], Any], *, takes: int = 1) -> Job:
        """Insert a job before all that wait, whatever `choose` says and however many wait. Raises QueueClosed."""
        with self._changed:
            return self._insert(Job(work, min(takes, self._capacity), is_urgent=True), 0)

    def _insert(self, job: Job, position: int) -> Job:
        with self._changed:
            self.check_open()
            job.when_cancelled(self._wake)
            self._waiting.insert(position, job)
            self._update_positions()
            self._changed.notify_all()
            self._make_room()
            return job

    def _make_room(self) -> None:
        """Suspend a job for one that has come while all threads work. Needs the lock."""
        if self._waiting and not self._waiting[0].is_urgent and not self._is_paused:
            found = self._choice()
            if isinstance(found, JobSuspend):
                found.job.suspend()

    def _choice(self) -> JobStart | JobSuspend | JobHold | None:
        """Return what `choose` says; the first job if that fails, or starts one without room. Needs the lock.

        Else the thread that asks would end, and with the last one the queue.
        """
        waiting, running = tuple(self._waiting), tuple(self._running)
        try:
            found = self._choose(self._free, waiting, running)
            if not isinstance(found, JobStart) or 0 < found.takes <= self._free:
                return found
            log.error("a job was to start on %d devices, and %d are free: jobs go in order", found.takes, self._free)
        except Exception:  # whatever it is, jobs that wait are not lost
            log.exception("the next job cannot be chosen: jobs go in order")
        return in_order(self._free, waiting, running)

    def resize(self, capacity: int) -> None:
        """Let jobs that run take so much together from now on, at most what it was at first; those that wait fit in."""
        with self._changed:
            self._free += capacity - self._capacity
            self._capacity = capacity
            for job in self._waiting:
                job.fit(capacity)
            self._changed.notify_all()

    def check_open(self) -> None:
        """Raise QueueClosed if the queue takes no more jobs."""
        if self._is_closed:
            raise QueueClosed("the server is closing: start it again")

    def stop_taking(self) -> None:
        """Take no more jobs. Those that wait or run are still done. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def finish(self, seconds: float) -> bool:
        """Take no more jobs and wait for those that are there, up to `seconds`. Return whether all have ended."""
        self.stop_taking()
        return self._ended.wait(seconds)

    def suspend_all(self, seconds: float) -> tuple[Job, ...]:
        """Take and start no more jobs, suspend those that run within `seconds`; return those that have not ended.

        Those that were suspended come first, as they began first.
        """
        with self._changed:
            self._is_closed = self._is_paused = True
            for job in self._running:
                job.suspend()
            self._changed.wait_for(lambda: not self._running, seconds)
            return tuple(job for job in (*self._running, *self._waiting) if not job.view.is_over)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Cancel everything, wait up to `timeout` seconds for running jobs, and abandon the others. Idempotent."""
        with self._changed:
            self.stop_taking()
            for job in (*self._waiting, *self._running):
                job.cancel(ServerEnding())
        if not self.finish(timeout):
            with self._changed:
                for job in self._running:
                    job.abandon()

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._free += job.takes
                self._take_back(job)
                self._update_positions()
                self._changed.notify_all()
            del job  # else its result would stay in memory until the next one
        with self._changed:
            self._threads -= 1
            if self._threads == 0:
                self._ended.set()

    def _take_back(self, job: Job) -> None:
        """Let jobs wait again that have not ended: a suspended one, and those joined with it. Needs the lock."""
        peers, job.peers = job.peers, ()
        for peer in peers:
            peer.part()
        for each in (*reversed(peers), job):
            self._running.remove(each)
            if not each.view.is_over:
                each.forget_suspension()
                self._waiting.insert(sum(other.is_urgent for other in self._waiting), each)

    def _next(self) -> Job | None:
        """Wait for a job that there is room for; None when the queue is closed and empty."""
        with self._changed:
            while not isinstance(start := self._chosen(), JobStart):
                if self._is_closed and not self._waiting:
                    return None
                self._changed.wait(None if start is None else start.seconds)
            job, job.takes = start.job, start.takes
            for each in (job, *start.peers):
                self._waiting.remove(each)
                self._running.append(each)
            for peer in start.peers:
                peer.join(job)
            job.peers = start.peers
            self._free -= job.takes
            self._update_positions()
            return job

    def _chosen(self) -> JobStart | JobHold | None:
        """Return the job that can start now; None if there is none until something changes. Needs the lock."""
        self._drop_ended()
        if not self._waiting or self._is_paused:
            return None
        is_urgent = self._waiting[0].is_urgent
        found = in_order(self._free, self._waiting, self._running) if is_urgent else self._choice()
        if isinstance(found, JobSuspend):
            found.job.suspend()
            return None  # until its devices are free
        return found

    def _drop_ended(self) -> None:
        self._waiting = [job for job in self._waiting if not job.view.is_over]

    def _wake(self) -> None:
        """Let threads look again: a job that waits may be gone."""
        with self._changed:
            self._changed.notify_all()

    def _update_positions(self) -> None:
        """Update `ahead` of waiting jobs. Needs the lock."""
        ahead = len(self._running)
        for job in self._waiting:
            job.set_ahead(ahead)
            ahead += not job.view.is_over
