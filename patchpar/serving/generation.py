"""Images and videos of one pipeline: opening it, its calls on free devices, and whether its workers are there.

Knows nothing of HTTP. Calls come from the threads of the queue, which has no more of them than devices are free.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from patchpar.errors import CallCancelled, LaunchError, PlanError, WorkerError, WorkerOutOfMemory
from patchpar.models.info import PipelineInfo
from patchpar.models.task import ANY_PROMPT, PipelineTask, purpose_of
from patchpar.pipeline.job import PipelineJob
from patchpar.pipeline.messages import Previews
from patchpar.pipeline.pipeline import ParallelPipeline
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan
from patchpar.serving.image_call import ImageCall
from patchpar.serving.job import Cancelled, Job
from patchpar.serving.latent_preview import ColourMap
from patchpar.serving.partial_images import CompletedImage, PartialImages
from patchpar.serving.rank_pool import RankPool
from patchpar.serving.served_task import check_servable, check_task
from patchpar.serving.settings import ServedModel
from patchpar.serving.warm_up import warm_up_arguments
from patchpar.stream.web.video_file import frames_of

PoolState = Literal["loading", "ready", "lost"]
STEP_SECONDS = 0.1
"""Between looks at the progress of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedImages:
    """PIL images, the statistics of each image's call, and the reason for the plan. `prompt_tokens`: of the prompt."""

    images: tuple[Any, ...]
    runs: tuple[Run, ...]
    reason: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedVideo:
    """Frames [F, H, W, 3] in uint8, the statistics of their call, and the reason for the plan."""

    frames: Any
    run: Run
    reason: str


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A call of the pipeline that has ended well: its output, statistics, and the reason for the plan."""

    output: Any
    run: Run
    reason: str


class ImageGenerator:
    """One pipeline, of images or videos. `ranks`: which of them are free, busy or lost."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.ranks = RankPool(len(served.devices), self._slow_ranks)
        self.task: PipelineTask | None = None
        self._is_warm = False
        self._colours = ColourMap()
        self._pipe: ParallelPipeline | None = None
        self._tokenizer: Any = None

    def _slow_ranks(self) -> Collection[int]:
        return () if self._pipe is None else self._pipe.slow_ranks

    @property
    def state(self) -> PoolState:
        """Whether enough ranks for a request are there: "lost" after calls in which too many of them failed."""
        if not self._is_warm:
            return "loading"
        return "ready" if self.ranks.usable >= self.served.devices_of(self.served.plan) else "lost"

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
        self._tokenizer = getattr(pipe, "tokenizer", None)
        try:
            self._tokens(ANY_PROMPT)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._tokenizer = None  # one that does not take a plain text

    def warm_up(self, job: Job) -> None:
        """Make calls of two steps on all devices, which verify the split model."""
        job.show(note="warming up")
        plan = self.served.plan
        takes = self.served.devices_of(plan)
        with self.ranks.taken(len(self.served.devices)) as ranks:
            groups = [ranks[start : start + takes] for start in range(0, len(ranks) - takes + 1, takes)]
            self._warm_up(job, plan, groups)
        self._is_warm = True

    def repair(self, job: Job) -> None:
        """Start workers of lost ranks again, which a short call on them does."""
        job.show(note="starting lost workers again")
        lost, plan = self.ranks.lost, self.served.plan
        takes = self.served.devices_of(plan)
        with self.ranks.taken(min(len(lost), job.takes), lost_first=True) as ranks:
            if len(ranks) % takes:  # of a request with a plan for fewer devices than others take
                plan, takes = "auto", len(ranks)
            self._warm_up(job, plan, [ranks[start : start + takes] for start in range(0, len(ranks), takes)])

    def _warm_up(self, job: Job, plan: Plan | str, groups: list[tuple[int, ...]]) -> None:
        arguments, size = warm_up_arguments(self.description, plan)
        for group in groups:
            partial = PartialImages(self._colours, size=size, count=1, image_index=0, send=lambda _: None)
            made = self._finished(job, self._submit(job, arguments, plan, group, partial.previews), group)
            images = getattr(made.output, "images", None)
            if images is not None and hasattr(images[0], "convert"):
                partial.fit(images[0])

    def generate(self, job: Job, call: ImageCall) -> GeneratedImages:
        """Return the images of a call. Raises Cancelled, PlanError, and what the pipeline raises.

        Images are made one after another: in a batch an image would equal that of the same seed alone to rounding
        only, and take the memory of all. Each is an event of the job, and so are its partial images.
        """
        plan = self.served.plan if call.plan is None else call.plan
        done: list[CompletedImage] = []
        tokens = self._tokens(call.arguments["prompt"])
        with self.ranks.taken(self._count(job, plan)) as ranks:
            for number, seed in enumerate(call.seeds):
                job.check()
                partial = PartialImages(
                    self._colours, size=call.size, count=call.partial_images, image_index=number, send=job.send
                )
                previews = partial.previews if call.partial_images else None
                made = self._finished(job, self._submit(job, _seeded(call, seed), plan, ranks, previews), ranks)
                image = _image_of(made.output)
                partial.fit(image)
                done.append(
                    CompletedImage(
                        image_index=number, image=image, run=made.run, reason=made.reason, prompt_tokens=tokens
                    )
                )
                job.send(done[-1])
        return GeneratedImages(
            images=tuple(each.image for each in done),
            runs=tuple(each.run for each in done),
            reason=done[-1].reason,
            prompt_tokens=tokens,
        )

    def generate_video(self, job: Job, call: ImageCall) -> GeneratedVideo:
        """Return the frames of a call. Raises as `generate` does."""
        plan = self.served.plan if call.plan is None else call.plan
        with self.ranks.taken(self._count(job, plan)) as ranks:
            made = self._finished(job, self._submit(job, _seeded(call, call.seed), plan, ranks), ranks)
        return GeneratedVideo(frames=frames_of(made.output), run=made.run, reason=made.reason)

    def _count(self, job: Job, plan: Plan | str) -> int:
        """Return the number of ranks of a job: those of its plan, or what the queue has given it."""
        return plan.world_size if isinstance(plan, Plan) else job.takes

    def _submit(
        self,
        job: Job,
        arguments: Mapping[str, Any],
        plan: Plan | str,
        ranks: tuple[int, ...],
        previews: Previews | None = None,
    ) -> PipelineJob:
        """Begin a call of the pipeline, which ends when the job is cancelled."""
        everywhere = len(ranks) == len(self.served.devices)
        call = self.pipe.submit(**arguments, plan=plan, ranks=None if everywhere else ranks, previews=previews)
        job.when_cancelled(call.cancel)
        return call

    def _finished(self, job: Job, call: PipelineJob, ranks: tuple[int, ...]) -> FinishedCall:
        """Wait for a call. Its steps are reported to the job."""
        while not call.wait(STEP_SECONDS):
            job.show(step=call.progress.step, steps=call.progress.steps)
        try:
            output = call.result()
        except CallCancelled:
            raise Cancelled from None
        except WorkerOutOfMemory:
            raise  # the workers are as they were
        except (WorkerError, LaunchError):
            self.ranks.lose(ranks)
            raise
        self.ranks.restore(ranks)
        assert call.run is not None
        return FinishedCall(output, call.run, self.pipe.explain(call))

    def close(self) -> None:
        """End the workers. Idempotent."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    def _tokens(self, prompt: str) -> int:
        """Return the number of tokens of a prompt by the pipeline's first tokenizer; 0 if none takes a plain text."""
        if not callable(self._tokenizer):
            return 0
        return len(self._tokenizer(prompt)["input_ids"])


def _seeded(call: ImageCall, seed: int) -> dict[str, Any]:
    from torch import Generator

    return {**call.arguments, "generator": Generator("cpu").manual_seed(seed)}


def _image_of(output: Any) -> Any:
    images = getattr(output, "images", None)
    if not images:
        raise PlanError(f"this model returns {type(output).__name__}, which has no images")
    return images[0]
