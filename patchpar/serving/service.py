"""What a server does, without HTTP: loads a model, checks and queues requests, keeps results, drains."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from patchpar.serving.finished_results import save_results
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.image_call import NO_UPLOADS, CallRules
from patchpar.serving.image_files import ImageFiles
from patchpar.serving.image_request import GenerationRequest
from patchpar.serving.job import Job
from patchpar.serving.job_facts import facts_of
from patchpar.serving.job_queue import CLOSE_SECONDS, QueueClosed, QueueFull, WorkQueue
from patchpar.serving.job_source import JobSource, write_journal
from patchpar.serving.kept_jobs import KeptJobs
from patchpar.serving.lora_registry import LoraRegistry, RegisteredLora
from patchpar.serving.metrics import ServerMetrics
from patchpar.serving.model_facts import model_facts
from patchpar.serving.pipeline_fields import PipelineFields
from patchpar.serving.queue_parts import QueuePart, by_priority, check_part
from patchpar.serving.ranks_in_service import check_removable, check_removed, put_back_rank, remove_rank
from patchpar.serving.refusals import check_name, draining, loading
from patchpar.serving.request_error import RequestError
from patchpar.serving.request_journal import RequestJournal
from patchpar.serving.scheduler import JobFacts, JobScheduler
from patchpar.serving.scheduling.learnt_costs import CallShape, LearntCosts
from patchpar.serving.scheduling.policies import POLICIES
from patchpar.serving.served_calls import ServedCalls
from patchpar.serving.settings import ServedModel, ServerSettings
from patchpar.serving.socket_tickets import SocketTickets
from patchpar.serving.unfinished_call import UnfinishedCall
from patchpar.serving.uploaded_image import Uploads
from patchpar.serving.video_call import video_arguments
from patchpar.serving.video_files import VideoFiles
from patchpar.serving.video_request import VideoRequest

MAX_RETRY_SECONDS = 600
SUSPEND_SECONDS = 15.0
"""Time for requests to come to their next denoiser call, at the end of a server with a journal."""
PAGE_IMAGE, PAGE_STEPS = CallShape(512 * 512, branches=2), 20  # what policies expect of a job of the page


class ImageService:
    """One model, one queue. `metrics` counts what happens; `kept` are jobs whose results are fetched later."""

    def __init__(self, generator: ImageGenerator, settings: ServerSettings) -> None:
        self.settings, self.generator = settings, generator
        self.metrics = ServerMetrics()
        self.journal: RequestJournal | None = None if settings.journal is None else RequestJournal(settings.journal)
        is_complete = self.journal is None or self.journal.is_empty
        self.kept, self.videos = KeptJobs(settings.kept, is_complete), VideoFiles(settings.kept.folder)
        self.files, self.tickets = ImageFiles(settings.kept, settings.journal), SocketTickets()
        self._devices = len(generator.served.devices)
        self.scheduler = JobScheduler(POLICIES[settings.policy], self._devices, LearntCosts(*generator.served.measured))
        self.scheduler.batch_wait = self.served.batch_wait
        self._queue = WorkQueue(max_waiting=settings.max_queue, capacity=self._devices, choose=self.scheduler.choose)
        self._calls = ServedCalls(generator, self.scheduler.costs, self.metrics, self._repair)
        self._rules: CallRules | None = None
        self._is_draining = False
        self.metrics.watch(queue_lengths=lambda: by_priority(self._queue.jobs[0]), state=lambda: self.state)
        self.metrics.watch_ranks(lambda: self.generator.ranks.states, generator.ranks.slowness)

    @property
    def name(self) -> str:
        """The name of the served model."""
        return self.generator.served.name

    @property
    def served(self) -> ServedModel:
        """The model, and how it is served."""
        return self.generator.served

    @property
    def route(self) -> str:
        """The path of requests."""
        return "/v1/videos" if self.generator.makes_videos else "/v1/images/generations"

    @property
    def loras(self) -> LoraRegistry:
        """The LoRAs that requests may select."""
        return self.generator.loras

    @property
    def model_facts(self) -> dict[str, Any]:
        """What clients are told of the model, beside its name; nothing before it is loaded."""
        if self._rules is None:
            return {}
        decodes = not self._rules.why_no_decoder
        return model_facts(self._rules.model, self.generator.task, self.settings.limits, decodes=decodes)

    @property
    def state(self) -> str:
        """One of loading, ready, lost and draining."""
        found = self.generator.state if self.kept.is_complete else "loading"
        return "draining" if self._is_draining else found

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
        self.scheduler.batch = self.served.batch if self.generator.can_batch else 1
        task = self.generator.task
        self._rules = CallRules(
            model=self.generator.description,
            served=self.generator.served,
            limits=self.settings.limits,
            needs_image=task is not None and task.begins_with == "image",
            loras=self.generator.loras,
            ranks=self.generator.ranks,
            why_no_decoder=self.generator.why_no_decoder,
        )
        self.generator.pings.start(self.generator.ranks.is_idle, self._lose, self.generator.ranks.is_overdue)

    def submit(
        self,
        request: GenerationRequest | VideoRequest,
        uploads: Uploads = NO_UPLOADS,
        *,
        route: str = "generation",
        owner: str = "",
        kept: UnfinishedCall | None = None,
        is_lasting: bool = True,
    ) -> Job:
        """Check and queue a request. Raises RequestError: 400, 404 for another model, 503 if it cannot be queued.

        `kept`: what an earlier server has of it. `is_lasting`: see JobSource.
        """
        rules = self._open_rules(request, is_earlier=kept is not None)
        is_video = isinstance(request, VideoRequest)
        if is_video != self.generator.makes_videos:
            product = "images" if is_video else "videos"
            raise RequestError(f"this model makes {product}: use {self.route}", code="unsupported_model", param="model")
        length: dict[str, Any] = {}
        if isinstance(request, VideoRequest):
            length = video_arguments(request, rules.model, rules.limits)
        else:
            self.files.check(request.response_format)
        call = rules.call_of(request, uploads, **length)
        source = JobSource(route=route, request=request, uploads=uploads, owner=owner, call=call, is_lasting=is_lasting)
        return self._queued(source, self._calls.video if is_video else self._calls.images, kept)

    def _open_rules(self, request: PipelineFields, *, is_earlier: bool) -> CallRules:
        """Return the rules. Raises RequestError. `is_earlier`: of the journal, which comes before new requests."""
        self.check_name(request.model or self.name)
        if self._is_draining:
            raise draining()
        if self._rules is None or not (is_earlier or self.kept.is_complete):
            raise loading()
        return self._rules

    def _queued(self, source: JobSource, work: Callable[[Job], Any], kept: UnfinishedCall | None) -> Job:
        """Append a job to the queue. Raises RequestError: 504 for a deadline that cannot be met, 503 if it is full."""
        call = source.call
        facts = facts_of(source.request, call, self.served, self.generator.description, self.settings.policy)
        if kept is None:
            self.scheduler.check_deadline(facts)
        admit, takes = self._admit(source.request, source.owner), call.devices_of(self.served)
        with self._refusing():
            return self._queue.append(work, takes=takes, facts=facts, source=source, kept=kept, admit=admit)

    def check_room(self, request: PipelineFields, owner: str, key: str = "") -> None:
        """Raise RequestError, as `submit`, if the queue takes no such request now; not if KeptJobs has one of `key`."""
        self._open_rules(request, is_earlier=False)
        if not self.kept.has_key(owner, key):
            with self._refusing():
                self._queue.check_room(self._admit(request, owner))

    def _admit(self, request: PipelineFields, owner: str) -> Callable[[Sequence[Job]], None]:
        return partial(check_part, QueuePart.of_request(request, owner), self.settings, self._retry)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise what the queue refuses as a RequestError, 503."""
        try:
            yield
        except QueueFull as error:
            raise RequestError(str(error), status=503, code="queue_full", retry_after=self._retry()) from None
        except QueueClosed:
            raise draining() from None

    def _retry(self) -> int:
        """Return seconds after which clients may try again: when what waits now has ended, as predicted."""
        return max(1, min(MAX_RETRY_SECONDS, round(self.scheduler.seconds_left(*self._queue.jobs))))

    def check_name(self, name: str) -> None:
        """Raise RequestError, 404, for a model that is not served."""
        check_name(name, self.name)

    def append_page_job(self, work: Callable[[Job], Any]) -> Job:
        """Append a job of the page, which takes all devices. Raises PatchparError where it cannot be queued."""
        if self._rules is None:
            raise loading()
        facts = JobFacts(shape=PAGE_IMAGE, steps=PAGE_STEPS, degrees=(self._devices,), can_suspend=False)
        return self._queue.append(self._on_all_ranks(work), takes=self._devices, facts=facts)

    def _on_all_ranks(self, work: Callable[[Job], Any]) -> Callable[[Job], Any]:
        def done(job: Job) -> Any:
            with self.generator.ranks.taken(self.generator.ranks.in_service):
                return work(job)

        return done

    def add_lora(self, lora: RegisteredLora) -> Job:
        """Load a LoRA once what runs has ended, before anything else starts. Raises RequestError, 503."""
        return self._alone(lambda job: self.loras.load(lora, self.generator.pipe))

    def remove_lora(self, name: str) -> Job:
        """Delete a LoRA as `add_lora` loads one. Requests that wait for it fail. Raises RequestError: 404, 503."""
        return self._alone(lambda job: self.loras.remove(name, self.generator.pipe))

    def remove_rank(self, rank: int) -> Job:
        """End the worker of a rank once what runs has ended. Raises RequestError: 404, 503; 409 where it is needed."""
        if self.settings.page_paths:
            raise RequestError(f"rank {rank}: the page takes all devices", status=409, code="rank_needed")
        check_removable(self.generator, rank)
        return self._alone(lambda job: self._change_ranks(partial(remove_rank, self.generator, job, rank)))

    def put_back_rank(self, rank: int) -> Job:
        """Start the worker of a removed rank again once what runs has ended. Raises RequestError: 404, 503."""
        check_removed(self.generator, rank)
        return self._alone(lambda job: self._change_ranks(partial(put_back_rank, self.generator, job, rank)))

    def _change_ranks(self, change: Callable[[], None]) -> None:
        change()
        count = self.generator.ranks.in_service
        self.scheduler.devices = min(count, self.scheduler.devices)  # never more than there is room for in the queue
        self._queue.resize(count)
        self.scheduler.devices = count

    def _alone(self, work: Callable[[Job], Any]) -> Job:
        if self._rules is None:
            raise loading()
        with self._refusing():
            return self._queue.put_first(self._on_all_ranks(work), takes=self._devices)

    def drain(self, seconds: float) -> bool:
        """Accept nothing more, and finish what was accepted within `seconds`. Return whether it has all ended."""
        self.stop_accepting()
        return self._queue.finish(seconds)

    def stop_accepting(self) -> None:
        """Accept nothing more; what was accepted goes on. Idempotent."""
        self._is_draining = True
        self._queue.stop_taking()

    def close(self) -> None:
        """Cancel what is left and end the workers. Idempotent."""
        self._is_draining = True
        self.generator.pings.close()
        if self.journal is not None:
            write_journal(self.journal, self._queue.suspend_all(SUSPEND_SECONDS), self.kept, self.name)
        self._queue.close()
        finished = self.kept.close()
        if self.journal is not None:
            save_results(self.journal, finished, self.name)
            self.journal.close()
            self.journal = None  # of the next server
        self.videos.close()
        self.files.close()
        self.generator.close()

    def _lose(self, rank: int) -> None:
        """Replace a rank that does not answer, and those that are started together with it."""
        lost = (rank,) if self.generator.pipe.can_release else tuple(range(self._devices))
        self.generator.ranks.lose(lost)
        self._repair(len(lost))

    def _repair(self, takes: int) -> None:
        """Start lost workers before anything else takes their devices; requests on other devices go on meanwhile."""
        with suppress(QueueClosed):
            self._queue.put_first(self.generator.repair, takes=takes)
