"""Images of one pipeline: opening it, its calls on free devices, and whether its workers are there.

Knows nothing of HTTP. Calls come from the threads of the queue, which has no more of them than devices are free.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from patchpar.errors import CallCancelled, LaunchError, PlanError, WorkerError, WorkerOutOfMemory
from patchpar.models.info import PipelineInfo
from patchpar.models.task import ANY_PROMPT, RequestedTask, purpose_of
from patchpar.pipeline.job import PipelineJob
from patchpar.pipeline.pipeline import ParallelPipeline
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan
from patchpar.serving.image_call import ImageCall
from patchpar.serving.job_queue import Cancelled, Job
from patchpar.serving.settings import ServedModel

PoolState = Literal["loading", "ready", "lost"]
TASK = RequestedTask(verb="serve")
WARM_UP: Mapping[str, Any] = {"prompt": ANY_PROMPT, "num_inference_steps": 2}
STEP_SECONDS = 0.1
"""Between looks at the progress of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedImages:
    """PIL images, the statistics of each image's call, and the reason for the plan. `prompt_tokens`: of the prompt."""

    images: tuple[Any, ...]
    runs: tuple[Run, ...]
    reason: str
    prompt_tokens: int


class ImageGenerator:
    """One pipeline. `state`: whether its workers can take a call; "lost" after a call in which they failed."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.state: PoolState = "loading"
        self._pipe: ParallelPipeline | None = None
        self._tokenizer: Any = None
        self._free, self._lock = list(range(len(served.devices))), threading.Lock()

    @property
    def pipe(self) -> ParallelPipeline:
        """The open pipeline."""
        assert self._pipe is not None, "the pipeline is opened before it is called"
        return self._pipe

    @property
    def description(self) -> PipelineInfo:
        """The model of the open pipeline."""
        return self.pipe.description

    def open(self) -> None:
        """Start the workers and load the model. Raises PlanError for a model that makes no images from text."""
        served = self.served
        TASK.check_model(served.model, served.options)
        self.adopt(
            ParallelPipeline.from_pretrained(
                served.model, devices=list(served.devices), plan=served.opened_with, **served.options
            )
        )

    def adopt(self, pipe: ParallelPipeline) -> None:
        """Use an open pipeline, and close it at the end. Raises as `open` does."""
        self._pipe = pipe
        TASK.check(purpose_of(pipe.description.pipeline))
        pipe.set_progress_bar_config(disable=True)
        self._tokenizer = getattr(pipe, "tokenizer", None)
        try:
            self._tokens(ANY_PROMPT)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._tokenizer = None  # one that does not take a plain text

    def warm_up(self, job: Job) -> None:
        """Make calls of two steps on all devices, which verify the split model, or start workers again."""
        job.show(note="warming up")
        plan, known = self.served.plan, self.description.parameters
        arguments = {name: value for name, value in WARM_UP.items() if name in known}
        if isinstance(plan, Plan) and plan.cfg > 1 and "negative_prompt" in known:
            arguments["negative_prompt"] = ""  # without one some pipelines have no second branch
        takes = self.served.devices_of(plan)
        with self._ranks(len(self.served.devices)) as ranks:
            groups = [ranks[start : start + takes] for start in range(0, len(ranks) - takes + 1, takes)]
            for call in [self._submit(job, arguments, plan, group) for group in groups]:
                self._finish(job, call)

    def generate(self, job: Job, call: ImageCall) -> GeneratedImages:
        """Return the images of a call. Raises Cancelled, PlanError, and what the pipeline raises.

        Images are made one after another: in a batch an image would equal that of the same seed alone to rounding
        only, and take the memory of all.
        """
        from torch import Generator

        plan = self.served.plan if call.plan is None else call.plan
        images, runs, reason = [], [], ""
        with self._ranks(self.served.devices_of(plan)) as ranks:
            for seed in call.seeds:
                job.check()
                arguments = {**call.arguments, "generator": Generator("cpu").manual_seed(seed)}
                made = self._submit(job, arguments, plan, ranks)
                images.append(_image_of(self._finish(job, made)))
                runs.append(made.run)
                reason = self.pipe.explain(made)
        return GeneratedImages(
            images=tuple(images),
            runs=tuple(run for run in runs if run is not None),
            reason=reason,
            prompt_tokens=self._tokens(call.arguments["prompt"]),
        )

    @contextmanager
    def _ranks(self, count: int) -> Iterator[tuple[int, ...]]:
        """Take so many free ranks, the first ones."""
        with self._lock:
            assert len(self._free) >= count, "the queue starts a job when its devices are free"
            found, self._free = tuple(self._free[:count]), self._free[count:]
        try:
            yield found
        finally:
            with self._lock:
                self._free = sorted([*self._free, *found])

    def _submit(self, job: Job, arguments: Mapping[str, Any], plan: Plan | str, ranks: tuple[int, ...]) -> PipelineJob:
        """Begin a call of the pipeline, which ends when the job is cancelled."""
        everywhere = len(ranks) == len(self.served.devices)
        call = self.pipe.submit(**arguments, plan=plan, ranks=None if everywhere else ranks)
        job.when_cancelled(call.cancel)
        return call

    def _finish(self, job: Job, call: PipelineJob) -> Any:
        """Return the output of a call. Its steps are reported to the job."""
        while not call.wait(STEP_SECONDS):
            job.show(step=call.progress.step, steps=call.progress.steps)
        try:
            output = call.result()
        except CallCancelled:
            raise Cancelled from None
        except WorkerOutOfMemory:
            raise  # the workers are as they were
        except (WorkerError, LaunchError):
            self.state = "lost"
            raise
        self.state = "ready"
        return output

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


def _image_of(output: Any) -> Any:
    images = getattr(output, "images", None)
    if not images:
        raise PlanError(f"this model returns {type(output).__name__}, which has no images")
    return images[0]
