"""Counts of a server for Prometheus. Values of labels come from closed sets: routes, statuses, ranks, kinds, states."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan
from patchpar.serving.pipeline_fields import MAX_PRIORITY
from patchpar.serving.rank_pool import RankState
from patchpar.serving.unsent_responses import UnsentResponses

STATES = ("loading", "ready", "lost", "draining")
RANK_STATES = get_args(RankState)
SIZES = (1, 2, 4, 8, 16, 32)
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIDES = (256, 512, 1024, 2048)
"""Of square images with as many pixels as the images, or videos, of a class have at most."""
RECOVERY_OUTCOMES = ("recovered", "failed")
PRIORITIES = range(-MAX_PRIORITY, MAX_PRIORITY + 1)


class ServerMetrics:
    """Metrics in a registry of their own. `unsent`: the responses on their way."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.unsent = UnsentResponses()
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
        self._step_seconds = Histogram(
            "patchpar_step_seconds",
            "Time of a call of an image or video, divided by its denoising steps, by plan and size.",
            ["plan", "size"],
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self._devices = Histogram(
            "patchpar_request_devices", "Devices that worked on an image or video.", buckets=SIZES, registry=registry
        )
        self.batches = Histogram(
            "patchpar_batch_size", "Requests that were made in one call.", buckets=SIZES, registry=registry
        )
        self.missed_deadlines = Counter(
            "patchpar_deadlines_missed_total", "Requests whose deadline passed while they waited.", registry=registry
        )
        self._bytes = Counter(
            "patchpar_bytes_sent_total", "Bytes sent to other ranks.", ["rank", "kind"], registry=registry
        )
        self._waits = Counter(
            "patchpar_wait_seconds_total", "Seconds that a rank waited for others.", ["rank", "kind"], registry=registry
        )
        self._add_interruptions(registry)
        self._add_gauges(registry)

    def _add_interruptions(self, registry: CollectorRegistry) -> None:
        self.suspensions = Counter(
            "patchpar_suspensions_total", "Running requests that were suspended.", registry=registry
        )
        self.recoveries = Counter(
            "patchpar_recoveries_total",
            "Losses of a worker by a call, which then went on, or failed.",
            ["outcome"],
            registry=registry,
        )
        for outcome in RECOVERY_OUTCOMES:
            self.recoveries.labels(outcome)  # so that both are there from the start, as 0

    def _add_gauges(self, registry: CollectorRegistry) -> None:
        self._queue_length = Gauge("patchpar_queue_length", "Requests that wait.", ["priority"], registry=registry)
        self._ranks = Gauge("patchpar_ranks", "Ranks by what they do.", ["state"], registry=registry)
        self._slowness = Gauge(
            "patchpar_rank_slowness",
            "How many times as long as the others a rank took in its latest calls; 1 for one that is not slow.",
            ["rank"],
            registry=registry,
        )
        self._state = Gauge("patchpar_state", "1 of the state that the server is in.", ["state"], registry=registry)

    def watch(self, *, queue_lengths: Callable[[], Mapping[int, int]], state: Callable[[], str]) -> None:
        """Read these whenever metrics are read. `queue_lengths`: how many requests wait, by priority."""
        for priority in PRIORITIES:
            self._queue_length.labels(priority).set_function(partial(_length_of, queue_lengths, priority))
        for each in STATES:
            self._state.labels(each).set_function(partial(_is_in, state, each))

    def watch_ranks(self, states: Callable[[], Sequence[str]], slowness: Callable[[int], float]) -> None:
        """Read what each rank does, and how slow it is, whenever metrics are read."""
        for each in RANK_STATES:
            self._ranks.labels(each).set_function(partial(_count_of, states, each))
        for rank in range(len(states())):
            self._slowness.labels(rank).set_function(partial(slowness, rank))

    def observe(self, queued_seconds: float, pixels: int, runs: Iterable[Run]) -> None:
        """Count a finished request of images of so many pixels, those of all frames of a video."""
        self._queue_seconds.observe(queued_seconds)
        for run in runs:
            self._image_seconds.observe(run.seconds)
            self._devices.observe(run.plan.world_size)
            self._steps.inc(run.steps)
            if run.steps:
                labels = plan_label(run.plan), size_label(pixels)
                self._step_seconds.labels(*labels).observe(run.seconds / run.steps)
            for figures in run.ranks:
                for kind, count in figures.bytes_sent.items():
                    self._bytes.labels(figures.rank, kind).inc(count)
                for kind, seconds in figures.seconds_waited.items():
                    self._waits.labels(figures.rank, kind).inc(seconds)

    def observe_response(self, route: str, status: int, seconds: float) -> None:
        """Count a response. `route`: the path as it is declared, never as it was requested."""
        self._requests.labels(route, status).inc()
        self._request_seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def plan_label(plan: Plan) -> str:
    """Return degrees and strategy of a plan, without its options: clients may choose these, of any number of values."""
    degrees = [f"{axis}={degree}" for axis, degree in plan.degrees().items() if degree > 1]
    return " ".join([*degrees, plan.strategy.name]) if degrees else "one device"


def size_label(pixels: int) -> str:
    """Return the class of an image's size."""
    side = next((side for side in SIDES if pixels <= side * side), None)
    return "larger" if side is None else f"{side}x{side}"


def _length_of(lengths: Callable[[], Mapping[int, int]], priority: int) -> float:
    return float(lengths().get(priority, 0))


def _count_of(states: Callable[[], Sequence[str]], name: str) -> float:
    return float(states().count(name))


def _is_in(state: Callable[[], str], name: str) -> float:
    return float(state() == name)
