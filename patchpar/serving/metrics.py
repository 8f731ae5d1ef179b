"""Counts of a server for Prometheus. Values of labels come from closed sets: routes, statuses, ranks, kinds, states."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from patchpar.pipeline.report import Run
from patchpar.serving.rank_pool import RankState

STATES = ("loading", "ready", "lost", "draining")
RANK_STATES = get_args(RankState)
SIZES = (1, 2, 4, 8, 16, 32)
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Metrics in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "patchpar_requests_total", "Requests by route and status.", ["route", "code"], registry=registry
        )
        self._request_seconds = Histogram(
            "patchpar_request_seconds", "From request to response.", ["route"], buckets=SECONDS, registry=registry
        )
        self._queue_seconds = Histogram(
            "patchpar_queue_seconds", "Time of requests in the queue.", buckets=SECONDS, registry=registry
        )
        self._image_seconds = Histogram(
            "patchpar_image_seconds", "Time of the call of an image.", buckets=SECONDS, registry=registry
        )
        self._steps = Counter("patchpar_steps_total", "Denoising steps.", registry=registry)
        self._batches = Histogram(
            "patchpar_batch_size", "Requests that were made in one call.", buckets=SIZES, registry=registry
        )
        self._suspensions = Counter(
            "patchpar_suspensions_total", "Running requests that were suspended.", registry=registry
        )
        self._recoveries = Counter(
            "patchpar_recoveries_total", "Times that a call went on after it had lost a worker.", registry=registry
        )
        self._missed = Counter(
            "patchpar_deadlines_missed_total", "Requests whose deadline passed while they waited.", registry=registry
        )
        self._bytes = Counter(
            "patchpar_bytes_sent_total", "Bytes sent to other ranks.", ["rank", "kind"], registry=registry
        )
        self._waits = Counter(
            "patchpar_wait_seconds_total", "Seconds that a rank waited for others.", ["rank", "kind"], registry=registry
        )
        self._queue_length = Gauge("patchpar_queue_length", "Requests that wait.", registry=registry)
        self._ranks = Gauge("patchpar_ranks", "Ranks by what they do.", ["state"], registry=registry)
        self._state = Gauge("patchpar_state", "1 of the state that the server is in.", ["state"], registry=registry)

    def watch(self, *, queue_length: Callable[[], int], state: Callable[[], str]) -> None:
        """Read these whenever metrics are read."""
        self._queue_length.set_function(queue_length)
        for each in STATES:
            self._state.labels(each).set_function(partial(_is_in, state, each))

    def watch_ranks(self, states: Callable[[], Sequence[str]]) -> None:
        """Read what each rank does whenever metrics are read."""
        for each in RANK_STATES:
            self._ranks.labels(each).set_function(partial(_count_of, states, each))

    def observe(self, queued_seconds: float, runs: Iterable[Run]) -> None:
        """Count a finished request of images."""
        self._queue_seconds.observe(queued_seconds)
        for run in runs:
            self._image_seconds.observe(run.seconds)
            self._steps.inc(run.steps)
            for figures in run.ranks:
                for kind, count in figures.bytes_sent.items():
                    self._bytes.labels(figures.rank, kind).inc(count)
                for kind, seconds in figures.seconds_waited.items():
                    self._waits.labels(figures.rank, kind).inc(seconds)

    def observe_batch(self, size: int) -> None:
        """Count a call that made the images of several requests."""
        self._batches.observe(size)

    def observe_recoveries(self, count: int) -> None:
        """Count calls that were made again after they had lost a worker."""
        self._recoveries.inc(count)

    def observe_suspension(self) -> None:
        """Count a running request that waits again."""
        self._suspensions.inc()

    def observe_missed_deadline(self) -> None:
        """Count a request that has waited for too long."""
        self._missed.inc()

    def observe_response(self, route: str, status: int, seconds: float) -> None:
        """Count a response. `route`: the path as it is declared, never as it was requested."""
        self._requests.labels(route, status).inc()
        self._request_seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _count_of(states: Callable[[], Sequence[str]], name: str) -> float:
    return float(states().count(name))


def _is_in(state: Callable[[], str], name: str) -> float:
    return float(state() == name)
