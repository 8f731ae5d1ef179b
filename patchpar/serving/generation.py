"""Images and videos of one pipeline: opening it, its calls on free devices, and whether its workers are there.

Knows nothing of HTTP. Calls come from the threads of the queue, which has no more of them than devices are free.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from patchpar.errors import (
    CallCancelled,
    CallSuspended,
    LaunchError,
    PlanError,
    WorkerError,
    WorkerOutOfMemory,
)
from patchpar.launch.remote_errors import has_broken_device
from patchpar.media.video_file import frames_of
from patchpar.models.info import PipelineInfo
from patchpar.models.task import PipelineTask, purpose_of
from patchpar.pipeline.job import PipelineJob
from patchpar.pipeline.pipeline import ParallelPipeline
from patchpar.plan.plan import Plan
from patchpar.serving.batching import BOUND, batch_arguments, batch_results, error_of_batch, seeded
from patchpar.serving.generated import FinishedCall, GeneratedImages, GeneratedVideo, image_of
from patchpar.serving.image_call import ImageCall
from patchpar.serving.job import Cancelled, Job, Suspended
from patchpar.serving.latent_preview import ColourMap
from patchpar.serving.lora_registry import LoraRegistry
from patchpar.serving.partial_images import CompletedImage, PartialImages
from patchpar.serving.prompt_tokens import PromptTokens
from patchpar.serving.rank_pings import RankPings
from patchpar.serving.rank_pool import RankPool
from patchpar.serving.served_task import check_servable, check_task
from patchpar.serving.settings import ServedModel
from patchpar.serving.unfinished_call import UnfinishedCall, ask_to_suspend
from patchpar.serving.warm_up import refusal_of, warm_up_arguments

PoolState = Literal["loading", "ready", "lost"]
STEP_SECONDS = 0.1
"""Between looks at the progress of a call."""
log = logging.getLogger(__name__)


class ImageGenerator:
    """One pipeline, of images or videos. `ranks`: which of them are free, busy or lost. `scheduler`: its own."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.pings = RankPings(self._ping, len(served.devices))
        self.ranks = RankPool(len(served.devices), self.pings, self._slow_ranks)
        self.task: PipelineTask | None = None
        self.scheduler: Any = None
        self.loras = LoraRegistry()
        self._is_warm = self.can_batch = False
        self.why_no_decoder = ""  # of partial images
        self._colours = ColourMap()
        self._pipe: ParallelPipeline | None = None
        self.tokens: PromptTokens | None = None

    def _slow_ranks(self) -> Mapping[int, float]:
        return {} if self._pipe is None else self._pipe.slow_ranks

    def _ping(self, rank: int, is_cancelled: Callable[[], bool]) -> None:
        pipe = self._pipe
        if pipe is not None:
            pipe.free_memory(rank, is_cancelled=is_cancelled)

    @property
    def state(self) -> PoolState:
        """Whether enough ranks for a request are there: "lost" where too many of them have failed, or do not answer."""
        if not self._is_warm:
            return "loading"
        needed = min(self.served.devices_of(self.served.plan), self.ranks.in_service)
        return "ready" if self.ranks.usable >= needed else "lost"

    @property
    def pipe(self) -> ParallelPipeline:
        """The open pipeline."""
        assert self._pipe is not None, "the pipeline is opened before it is called"
        return self._pipe

    @property
    def description(self) -> PipelineInfo:
        """The model of the open pipeline."""
        return self.pipe.description

    @property
    def makes_videos(self) -> bool:
        """Whether the open pipeline returns frames."""
        return self.task is not None and self.task.product == "video"

    def open(self) -> None:
        """Start the workers and load the model. Raises PlanError for a model that makes neither images nor videos."""
        served = self.served
        check_servable(served.model, served.options)
        self.adopt(
            ParallelPipeline.from_pretrained(
                served.model, devices=list(served.devices), plan=served.opened_with, **served.options
            )
        )

    def adopt(self, pipe: ParallelPipeline) -> None:
        """Use an open pipeline, and close it at the end. Raises as `open` does."""
        self._pipe = pipe
        self.task = purpose_of(pipe.description.pipeline)
        check_task(self.task)
        pipe.set_progress_bar_config(disable=True)
        for lora in self.served.loras:
            self.loras.load(lora, pipe)
        self.scheduler = getattr(pipe, "scheduler", None)
        self.tokens = PromptTokens(pipe)

    def warm_up(self, job: Job) -> None:
        """Make calls of two steps on all devices, which verify the split model."""
        job.show(note="warming up")
        plan = self.served.plan
        takes = self.served.devices_of(plan)
        with self.ranks.taken(len(self.served.devices)) as ranks:
            groups = [ranks[start : start + takes] for start in range(0, len(ranks) - takes + 1, takes)]
            if not self.makes_videos:
                self.why_no_decoder = refusal_of(partial(self._short_call, job, plan, groups[0], decoded=True))
            self.warm_up_on(job, plan, groups)  # also starts workers again that have been lost in it
            if self.served.batch > 1:
                self.can_batch = self._batches_are_equal(job, groups[0])
        self._is_warm = True

    def _batches_are_equal(self, job: Job, ranks: tuple[int, ...]) -> bool:
        """Return whether two images of one call are those made alone, within BOUND; the log says why not."""
        arguments, size = warm_up_arguments(self.description, self.served.plan)
        if "image" in arguments or "prompt" not in arguments or self.makes_videos:
            return False

        def made(arguments: Mapping[str, Any]) -> Any:
            begun = self._submit(arguments, self.served.plan, ranks, adapters=self.loras.adapters({}))
            return self._finished(job, begun, ranks).output.images

        worst = error_of_batch(made, arguments, size)
        if worst > BOUND:
            log.warning("requests are not joined: images of a batch differ by %.1e, and at most %g may", worst, BOUND)
        return worst <= BOUND

    def repair(self, job: Job) -> None:
        """Start workers of lost ranks again, which a short call on them does."""
        job.show(note="starting lost workers again")
        lost, plan = self.ranks.lost, self.served.plan
        takes = self.served.devices_of(plan)
        with self.ranks.taken(min(len(lost), job.takes), lost_first=True) as ranks:
            if len(ranks) % takes:  # of a request with a plan for fewer devices than others take
                plan, takes = "auto", len(ranks)
            self.warm_up_on(job, plan, [ranks[start : start + takes] for start in range(0, len(ranks), takes)])

    def warm_up_on(self, job: Job, plan: Plan | str, groups: list[tuple[int, ...]]) -> None:
        """Make a call of two steps on each of these groups of ranks."""
        for group in groups:
            made, previews = self._short_call(job, plan, group)
            images = getattr(made.output, "images", None)
            if images is not None and hasattr(images[0], "convert"):
                previews.fit(images[0])

    def _short_call(
        self, job: Job, plan: Plan | str, ranks: tuple[int, ...], *, decoded: bool = False
    ) -> tuple[FinishedCall, PartialImages]:
        """Make a call of two steps with a partial image, and return it with what has received that."""
        arguments, size = warm_up_arguments(self.description, plan)
        previews = PartialImages(self._colours, size=size, count=1, image_index=0, send=lambda _: None, decoded=decoded)
        begun = self._submit(arguments, plan, ranks, previews=previews.previews, adapters=self.loras.adapters({}))
        return self._finished(job, begun, ranks), previews

    def generate(self, job: Job, call: ImageCall) -> GeneratedImages:
        """Return the images of a call. Raises Cancelled, Suspended, PlanError, and what the pipeline raises.

        Images are made one after another, each as it would be alone. Each is an event of the job, and so are its
        partial images. A job that was suspended goes on with the first image that is not finished.
        """
        plan = call.plan_of(self.served)
        kept = job.kept = job.kept or UnfinishedCall()
        tokens = self._tokens(call.arguments.get("prompt", ""))
        with self.ranks.taken(self._count(job, plan)) as ranks:
            for number in range(len(kept.done), call.count):
                latents = PartialImages(
                    self._colours,
                    size=call.size,
                    count=call.partial_images,
                    image_index=number,
                    send=job.send,
                    decoded=call.decodes_partial_images,
                )
                latents.after, latents.sent = kept.partial
                kept.watch(latents)
                previews = latents.previews if call.partial_images else None
                made = self._made(job, call, call.seeds[number], plan, ranks, previews=previews)
                image = image_of(made.output, call.arguments)
                latents.fit(image)
                kept.runs.append(made.run)
                kept.finish(
                    CompletedImage(
                        image_index=number,
                        image=image,
                        figures=made.figures,
                        reason=made.reason,
                        prompt_tokens=tokens,
                    )
                )
                job.send(kept.done[-1])
        return GeneratedImages(tuple(kept.done), tuple(kept.runs))

    def generate_batch(self, job: Job, calls: Sequence[ImageCall]) -> list[GeneratedImages]:
        """Return the one image of each of several calls that are alike, made together. Raises as `generate` does."""
        plan = calls[0].plan_of(self.served)
        adapters = self.loras.adapters(calls[0].loras)
        with self.ranks.taken(self._count(job, plan)) as ranks:
            made = self._finished(job, self._submit(batch_arguments(calls), plan, ranks, adapters=adapters), ranks)
        return batch_results(made, made.output.images, [self._tokens(call.arguments["prompt"]) for call in calls])

    def generate_video(self, job: Job, call: ImageCall) -> GeneratedVideo:
        """Return the frames of a call. Raises as `generate` does."""
        plan = call.plan_of(self.served)
        job.kept = job.kept or UnfinishedCall()
        with self.ranks.taken(self._count(job, plan)) as ranks:
            made = self._made(job, call, call.seed, plan, ranks)
        return GeneratedVideo(frames=frames_of(made.output), run=made.run, reason=made.reason, figures=made.figures)

    def _made(
        self, job: Job, call: ImageCall, seed: int, plan: Plan | str, ranks: tuple[int, ...], **options: Any
    ) -> FinishedCall:
        """Make a call, from its beginning or from where it was suspended. Raises as `generate` does."""
        job.check()
        kept: UnfinishedCall = job.kept
        options["adapters"] = self.loras.adapters(call.loras)
        suspended = kept.suspended
        arguments = seeded(call, seed)
        try:
            begun = self._submit(arguments, plan, ranks, resume=suspended, **options)
        except PlanError as error:
            if suspended is None:
                raise
            log.warning("a request starts from its beginning: %s", error)
            begun = self._submit(seeded(call, seed), plan, ranks, **options)
        kept.begin(begun)
        try:
            return self._finished(job, begun, ranks)
        except Suspended:
            kept.suspend(begun)
            raise

    def _count(self, job: Job, plan: Plan | str) -> int:
        """Return the number of ranks of a job: of its plan, or what the queue has given it. Raises RequestError."""
        if not isinstance(plan, Plan):
            return job.takes
        self.ranks.check(plan)
        return plan.world_size

    def _submit(
        self, arguments: Mapping[str, Any], plan: Plan | str, ranks: tuple[int, ...], **options: Any
    ) -> PipelineJob:
        """Begin a call of the pipeline. `options`: of `submit`."""
        named = None if len(ranks) == len(self.served.devices) else ranks
        return self.pipe.submit(**arguments, plan=plan, ranks=named, max_retries=self.served.max_retries, **options)

    def _finished(self, job: Job, call: PipelineJob, ranks: tuple[int, ...]) -> FinishedCall:
        """Wait for a call, which ends with its job, and report steps. Raises Cancelled, Suspended, and its error."""
        before = 0 if job.kept is None else job.kept.done_steps
        with job.during(cancel=call.cancel, suspend=partial(ask_to_suspend, call)):
            while not call.wait(STEP_SECONDS):
                job.show(step=call.progress.step, steps=call.progress.steps)
                job.done_steps = before + call.progress.step
        try:
            output = call.result()
        except CallSuspended:
            raise Suspended from None
        except CallCancelled:
            raise Cancelled from None
        except WorkerOutOfMemory:
            raise  # the workers are as they were
        except RuntimeError as error:
            if isinstance(error, (WorkerError, LaunchError)) or has_broken_device(error):  # that of this process
                self.ranks.lose(ranks)
            raise
        self.ranks.restore(ranks)
        assert call.run is not None
        return FinishedCall(output, call.run, self.pipe.explain(call), call.retries)

    def close(self) -> None:
        """End the workers. Idempotent. The description of the model stays: requests need it until the port ends."""
        if self._pipe is not None:
            self._pipe.close()

    def _tokens(self, prompt: str) -> int:
        return 0 if self.tokens is None else self.tokens.count(prompt)
