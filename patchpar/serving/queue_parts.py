"""How many of the requests that wait one API key, and one user of it, may have, so that others find room."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from patchpar.serving.job import Job
from patchpar.serving.job_source import JobSource
from patchpar.serving.pipeline_fields import PipelineFields
from patchpar.serving.request_error import RequestError
from patchpar.serving.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class QueuePart:
    """Whose request it is: a name of the key, and the user that the request names, "" for none."""

    key: str
    user: str

    @classmethod
    def of(cls, source: Any) -> "QueuePart | None":
        """Return whose job it is by its source; None for a job of no request."""
        return cls.of_request(source.request, source.owner) if isinstance(source, JobSource) else None

    @classmethod
    def of_request(cls, request: PipelineFields, owner: str) -> "QueuePart":
        """Return whose request it is."""
        return cls(owner, request.user or request.safety_identifier or "")


def by_priority(waiting: Iterable[Job]) -> Counter[int]:
    """Return how many of these jobs have each priority; those that have none count as 0."""
    return Counter(getattr(job.facts, "priority", 0) for job in waiting)


def check_part(own: QueuePart, settings: ServerSettings, seconds: Callable[[], int], waiting: Sequence[Job]) -> None:
    """Raise RequestError, 429, for a request of a key or a user of whom as many wait as may.

    `seconds` returns those after which clients may try again.
    """
    others = [part for job in waiting if (part := QueuePart.of(job.source)) is not None and part.key == own.key]
    _check(len(others), settings.max_per_key, "of this API key", seconds)
    if own.user:
        _check(sum(part == own for part in others), settings.max_per_user, "of this user", seconds)


def _check(count: int, most: int | None, whose: str, seconds: Callable[[], int]) -> None:
    if most is not None and count >= most:
        raise RequestError(
            f"{count} requests {whose} are waiting, which is the limit: try later",
            status=429,
            code="rate_limit_exceeded",
            retry_after=seconds(),
        )
