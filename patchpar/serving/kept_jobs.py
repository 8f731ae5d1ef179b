"""Jobs whose results are kept until they are fetched, deleted or expire: those of /v1/jobs and /v1/videos."""

import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from patchpar.errors import PlanError
from patchpar.serving.image_call import ImageCall
from patchpar.serving.job import Cancelled, Job, Journaled
from patchpar.serving.out_of_memory import is_out_of_memory
from patchpar.serving.partial_images import CompletedImage
from patchpar.serving.refusals import loading
from patchpar.serving.request_error import RequestError
from patchpar.serving.settings import KeptResults

Kind = Literal["job", "video"]
Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWork:
    """What a kept job is for. `route`: "generation", "edit" or "video". `owner`: who may see it.

    `finish`: makes of the job's result what is kept of it. `drop`: frees what is kept. `size`: returns its bytes.
    `ended`: called at its end.
    `is_awaited`: whoever waits for it takes its result, and deletes it; until then it is kept whatever the limits say.
    """

    route: str
    owner: str
    request: Any
    finish: Callable[["KeptJob", Any], Any]
    drop: Callable[["KeptJob", Any], object] = lambda *_: None
    size: Callable[[Any], int] = lambda _: 0
    ended: Callable[["KeptJob"], object] = lambda _: None
    is_awaited: bool = False

    @property
    def kind(self) -> Kind:
        """See `kind_of`."""
        return kind_of(self.route)


class KeptJob:
    """A job and, once it has ended, its result or the exception that it ended with. Times are Unix times in seconds."""

    def __init__(
        self, work: KeptWork, job: Job, call: ImageCall, *, name: str = "", created_at: int | None = None
    ) -> None:
        self.work, self.job = work, job
        self.call = call
        """Of its request; once it has ended without arguments, which have its uploads."""
        self.id = name or new_id(work.kind)
        self.created_at = int(time.time()) if created_at is None else created_at
        self.key, self.digest = "", b""
        """Of the Idempotency-Key that it was sent with."""
        self.completed_at: int | None = None
        self.result: Any = None
        self.bytes = 0
        """Of its result."""
        self.error: Exception | None = None
        self._end: Status | None = None
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # so that nobody who waits for it can end it

    def complete(self, result: Any, completed_at: int) -> None:
        """Take the result that an earlier server has made."""
        self.result, self.bytes = result, self.work.size(result)
        self.completed_at, self._end = completed_at, "completed"
        self.ended.set_result(None)

    @property
    def status(self) -> Status:
        """Where it is; "in_progress" until its result is there."""
        if self._end is not None:
            return self._end
        return "queued" if self.job.view.state == "waiting" else "in_progress"

    @property
    def progress(self) -> int:
        """Percent: 2 for the prompt, 88 for steps, 10 for decoding and encoding."""
        view = self.job.view
        if self._end == "completed":
            return 100
        if view.state == "waiting" and not self.job.suspensions:
            return 0
        if view.state == "done":
            return 95
        made = sum(isinstance(event, CompletedImage) for event in self.job.events())
        part = view.step / view.steps if view.steps and made < self.call.count else 0.0
        return 2 + round(88 * min(1.0, (made + part) / self.call.count))

    def finish(self, outcome: "Future[Any]") -> None:
        """Take the outcome of its job, and free the job's own copy of the result."""
        try:
            self.result = self.work.finish(self, outcome.result())
            self.bytes = self.work.size(self.result)
            end: Status = "completed"
        except Journaled as error:  # the next server goes on with it, under the same ID
            self.error = error
            self.ended.set_result(None)
            return
        except Cancelled as error:
            self.error, end = error, "cancelled"
        except Exception as error:
            is_public = isinstance(error, (PlanError, RequestError)) or is_out_of_memory(error)
            if not is_public:
                log.exception("%s failed", self.id)
            self.error, end = error.with_traceback(None), "failed"
        ended = ended_job(self.job.view.step, self.job.view.steps)  # without what the other one has
        self.completed_at, self._end, self.job = int(time.time()), end, ended
        self.call = replace(self.call, arguments={})
        self.ended.set_result(None)


def ended_job(step: int, steps: int) -> Job:
    """Return a job that has ended at this step and has nothing else."""
    ended = Job(lambda _: None)
    ended.show(step=step, steps=steps)
    ended.run()
    return ended


def kind_of(route: str) -> Kind:
    """Return the kind of a job by the route of its request."""
    return "video" if route == "video" else "job"


def new_id(kind: Kind) -> str:
    """Return an ID that cannot be guessed."""
    return f"{kind}_{secrets.token_hex(12)}"


class KeptJobs:
    """The kept jobs of a server. Results go one after another through a thread that encodes them.

    `is_complete`: else those of an earlier server are still to come, and what is not there yet is no reason for a 404.
    """

    def __init__(self, limits: KeptResults, is_complete: bool = True) -> None:
        self._limits, self.is_complete = limits, is_complete
        self._jobs: dict[str, KeptJob] = {}
        self._keys: dict[tuple[str, str], tuple[str, bytes]] = {}
        self._lock = threading.RLock()
        self._encoder = ThreadPoolExecutor(1, "patchpar-encoder")

    def add(
        self,
        work: KeptWork,
        submit: Callable[[], Job],
        *,
        key: str = "",
        digest: bytes = b"",
        name: str = "",
        created_at: int | None = None,
    ) -> KeptJob:
        """Submit a job and keep it. Raises what `submit` raises.

        `name`, `created_at`: of a job that goes on.

        `key`: a name by which the owner may send the same request again, and get the same job. `digest`: of the
        request; another one under the same key is refused with RequestError, 409.
        """
        with self._lock if key else nullcontext():  # `submit` may take a while: only the same key has to wait for it
            known = self._of_key(work.owner, key, digest)
            if known is not None:
                return known
            job = submit()
            kept = KeptJob(work, job, job.source.call, name=name, created_at=created_at)
            kept.key, kept.digest = key, digest
            self.restore(kept)
        kept.job.outcome.add_done_callback(lambda outcome: self._finish(kept, outcome))
        return kept

    def has_key(self, owner: str, key: str) -> bool:
        """Whether there is a job that its owner has sent with this key."""
        with self._lock:
            found = self._keys.get((owner, key)) if key else None
            return found is not None and found[0] in self._jobs

    def _of_key(self, owner: str, key: str, digest: bytes) -> KeptJob | None:
        """Return the job that was sent with a key. Raises RequestError, 409, for one of another request."""
        with self._lock:
            self._sweep()
            found = self._keys.get((owner, key)) if key else None
            if found is None or found[0] not in self._jobs:
                return None
            if found[1] != digest:
                reason = "Idempotency-Key: another request has used it: use a new one"
                raise RequestError(reason, status=409, code="idempotency_conflict", is_final=True)
            return self._jobs[found[0]]

    def restore(self, kept: KeptJob) -> None:
        """Keep a job, which an earlier server may have finished."""
        with self._lock:
            self._jobs[kept.id] = kept
            if kept.key:
                self._keys[kept.work.owner, kept.key] = kept.id, kept.digest

    def get(self, name: str, kind: Kind, owner: str) -> KeptJob:
        """Return a job by its ID. Raises RequestError: 404, also for another owner's; 503 for one still to come."""
        with self._lock:
            self._sweep()
            found = self._jobs.get(name)
        if found is None and not self.is_complete:
            raise loading()
        if found is None or found.work.kind != kind or found.work.owner != owner:
            raise RequestError(
                f"there is no {kind} {name[:80]!r}: it has expired, was deleted, or never was",
                status=404,
                code="not_found",
            )
        return found

    def all_of(self, kind: Kind, owner: str) -> list[KeptJob]:
        """Return the jobs of an owner, the oldest first. Raises RequestError, 503, while some are still to come."""
        if not self.is_complete:
            raise loading()
        with self._lock:
            self._sweep()
            return [each for each in self._jobs.values() if each.work.kind == kind and each.work.owner == owner]

    def expires_at(self, kept: KeptJob) -> int | None:
        """Return when a job expires, in Unix time; None before it has ended."""
        return None if kept.completed_at is None else kept.completed_at + int(self._limits.seconds)

    def of(self, job: Job) -> KeptJob | None:
        """Return what is kept of a job; None for one whose client waits for it."""
        with self._lock:
            return next((each for each in self._jobs.values() if each.job is job), None)

    def delete(self, kept: KeptJob) -> None:
        """Cancel a job, if it has not ended, and keep nothing of it."""
        with self._lock:
            self._jobs.pop(kept.id, None)
        kept.job.cancel()
        if kept.ended.done():
            self._drop(kept)

    def close(self) -> list[KeptJob]:
        """Finish what has ended, and take no more; return the jobs that have a result. Idempotent."""
        self._encoder.shutdown(wait=True)
        with self._lock:
            self._sweep()
            return [each for each in self._jobs.values() if each.status == "completed"]

    def _finish(self, kept: KeptJob, outcome: "Future[Any]") -> None:
        with suppress(RuntimeError):  # the server ends
            self._encoder.submit(self._finish_now, kept, outcome)

    def _finish_now(self, kept: KeptJob, outcome: "Future[Any]") -> None:
        kept.finish(outcome)
        kept.work.ended(kept)
        with self._lock:
            is_kept = kept.id in self._jobs
            self._sweep()
        if not is_kept:  # deleted meanwhile
            self._drop(kept)

    def _drop(self, kept: KeptJob) -> None:
        result, kept.result = kept.result, None
        if result is not None:
            kept.work.drop(kept, result)

    def _sweep(self) -> None:
        """Drop jobs that have expired, and beyond the limits the oldest ones of who has most. Needs the lock."""
        now = time.time()
        late, ended = list[KeptJob](), defaultdict[str, deque[KeptJob]](deque)
        for each in (each for each in self._jobs.values() if each.ended.done() and not each.work.is_awaited):
            if (self.expires_at(each) or now) < now:
                late.append(each)
            else:
                ended[each.work.owner].append(each)
        for _ in range(sum(map(len, ended.values())) - self._limits.count):
            late.append(max(ended.values(), key=len).popleft())
        late += self._too_large(ended.values())
        for kept in late:
            del self._jobs[kept.id]
            self._drop(kept)
        self._keys = {key: found for key, found in self._keys.items() if found[0] in self._jobs}

    def _too_large(self, by_owner: Collection[deque[KeptJob]]) -> Iterator[KeptJob]:
        """Yield the oldest results of the owner with most bytes, until the rest is within the limit, or only one."""
        taken = {id(jobs): sum(kept.bytes for kept in jobs) for jobs in by_owner}
        while sum(taken.values()) > self._limits.bytes and sum(map(len, by_owner)) > 1:
            jobs = max(by_owner, key=lambda jobs: taken[id(jobs)])
            taken[id(jobs)] -= jobs[0].bytes
            yield jobs.popleft()
