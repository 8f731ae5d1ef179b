"""What a server does, without HTTP: loads a model, checks and queues requests, drains."""

from dataclasses import dataclass

from patchpar.errors import LaunchError, WorkerError
from patchpar.serving.generation import GeneratedImages, ImageGenerator
from patchpar.serving.image_call import CallRules, ImageCall
from patchpar.serving.image_request import GenerationRequest
from patchpar.serving.job_queue import CLOSE_SECONDS, Job, QueueClosed, QueueFull, WorkQueue
from patchpar.serving.metrics import ServerMetrics
from patchpar.serving.request_error import RequestError
from patchpar.serving.settings import ServerSettings

LOADING_SECONDS, FULL_SECONDS = 5, 5
MAX_RETRY_SECONDS = 600


@dataclass(frozen=True, slots=True)
class QueuedImages:
    """A request in the queue."""

    call: ImageCall
    job: Job


class ImageService:
    """One model, one queue. `metrics` counts what happens."""

    def __init__(self, generator: ImageGenerator, settings: ServerSettings) -> None:
        self.settings, self.generator = settings, generator
        self.metrics = ServerMetrics()
        self._devices = len(generator.served.devices)
        self._queue = WorkQueue(max_waiting=settings.max_queue, capacity=self._devices)
        self._rules: CallRules | None = None
        self._is_draining = False
        self._seconds = float(FULL_SECONDS)  # of the last request
        self.metrics.watch(queue_length=lambda: self.waiting, state=lambda: self.state)

    @property
    def name(self) -> str:
        """The name of the served model."""
        return self.generator.served.name

    @property
    def state(self) -> str:
        """One of loading, ready, lost and draining."""
        return "draining" if self._is_draining else self.generator.state

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self._queue.waiting

    @property
    def is_computing(self) -> bool:
        """Whether a request still runs after `close`: on a device in this process, where a call cannot be ended."""
        return not self._queue.finish(CLOSE_SECONDS)

    def load(self) -> None:
        """Load the model and warm it up. Raises what these raise."""
        self.generator.open()
        self.prepare()

    def prepare(self) -> None:
        """Warm up the open pipeline, and accept requests from then on."""
        self._queue.append(self.generator.warm_up, takes=self._devices).outcome.result()
        self._rules = CallRules(
            model=self.generator.description, served=self.generator.served, limits=self.settings.limits
        )

    def submit(self, request: GenerationRequest) -> QueuedImages:
        """Check and queue a request. Raises RequestError: 400, 404 for another model, 503 if it cannot be queued."""
        self.check_name(request.model or self.name)
        if self._is_draining:
            raise _draining()
        if self._rules is None:
            raise RequestError("the model is being loaded", status=503, code="loading", retry_after=LOADING_SECONDS)
        call = self._rules.call_of(request)
        try:
            takes = self.generator.served.devices_of(self.generator.served.plan if call.plan is None else call.plan)
            return QueuedImages(call, self._queue.append(lambda job: self._work(job, call), takes=takes))
        except QueueFull as error:
            raise RequestError(str(error), status=503, code="queue_full", retry_after=self._wait_seconds()) from None
        except QueueClosed:
            raise _draining() from None

    def check_name(self, name: str) -> None:
        """Raise RequestError, 404, for a model that is not served."""
        if name != self.name:
            raise RequestError(
                f"model {name[:80]!r} is not served here: there is {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def drain(self, seconds: float) -> bool:
        """Accept nothing more, and finish what was accepted within `seconds`. Return whether it has all ended."""
        self._is_draining = True
        return self._queue.finish(seconds)

    def close(self) -> None:
        """Cancel what is left and end the workers. Idempotent."""
        self._is_draining = True
        self._queue.close()
        self.generator.close()

    def _work(self, job: Job, call: ImageCall) -> GeneratedImages:
        try:
            images = self.generator.generate(job, call)
        except (WorkerError, LaunchError):
            self._restart_workers()
            raise
        self._seconds = sum(run.seconds for run in images.runs)
        self.metrics.observe(job.queued_seconds, images.runs)
        return images

    def _restart_workers(self) -> None:
        """Start lost workers before the next request comes; jobs that wait do so themselves."""
        try:
            self._queue.append(self.generator.warm_up, takes=self._devices)
        except (QueueFull, QueueClosed):
            return

    def _wait_seconds(self) -> int:
        """Return the seconds until the queue is likely to be shorter: those of the last request, for Retry-After."""
        return max(1, min(MAX_RETRY_SECONDS, round(self._seconds)))


def _draining() -> RequestError:
    return RequestError(
        "the server is ending and accepts no more requests", status=503, code="draining", retry_after=FULL_SECONDS
    )
