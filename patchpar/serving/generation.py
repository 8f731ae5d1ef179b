"""Images of one pipeline: opening it, its calls, and whether its workers are there.

Knows nothing of HTTP. Calls come from one thread at a time, that of the queue.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from patchpar.errors import LaunchError, PlanError, WorkerError
from patchpar.models.info import PipelineInfo
from patchpar.models.task import ANY_PROMPT, RequestedTask, purpose_of
from patchpar.pipeline.pipeline import ParallelPipeline
from patchpar.pipeline.report import Run
from patchpar.serving.image_call import ImageCall
from patchpar.serving.job_queue import Job
from patchpar.serving.settings import ServedModel

PoolState = Literal["loading", "ready", "lost"]
TASK = RequestedTask(verb="serve")
WARM_UP: Mapping[str, Any] = {"prompt": ANY_PROMPT, "num_inference_steps": 2}
CALLBACK = "callback_on_step_end"
TENSORS = "callback_on_step_end_tensor_inputs"


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
        self._plan = served.plan

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
                served.model, devices=list(served.devices), plan=served.plan, **served.options
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
        """Make a call of two steps, which verifies the split model, or starts the workers again."""
        job.show(note="warming up")
        plan, known = self.served.plan, self.description.parameters
        self._set_plan(plan)
        arguments = {name: value for name, value in WARM_UP.items() if name in known}
        if getattr(plan, "cfg", 1) > 1 and "negative_prompt" in known:
            arguments["negative_prompt"] = ""  # without one some pipelines have no second branch
        self._run(job, arguments)

    def generate(self, job: Job, call: ImageCall) -> GeneratedImages:
        """Return the images of a call. Raises Cancelled between steps, PlanError, and what the pipeline raises.

        Images are made one after another: in a batch an image would equal that of the same seed alone to rounding
        only, and take the memory of all.
        """
        from torch import Generator

        self._set_plan(self.served.plan if call.plan is None else call.plan)
        images, runs = [], []
        for seed in call.seeds:
            job.check()
            generator = Generator("cpu").manual_seed(seed)
            output = self._run(job, {**call.arguments, "generator": generator})
            images.append(_image_of(output))
            runs.append(self.pipe.last_run)
        return GeneratedImages(
            images=tuple(images),
            runs=tuple(run for run in runs if run is not None),
            reason=self.pipe.explain(),
            prompt_tokens=self._tokens(call.arguments["prompt"]),
        )

    def close(self) -> None:
        """End the workers. Idempotent."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    def _run(self, job: Job, arguments: Mapping[str, Any]) -> Any:
        """Call the pipeline. Steps are reported to the job, which may cancel the call between two of them."""
        watched: dict[str, Any] = {}
        if CALLBACK in self.description.parameters:
            watched[CALLBACK] = partial(_after_step, job)
            if TENSORS in self.description.parameters:
                watched[TENSORS] = []  # no latents are sent for it
        self.pipe.on_step = lambda step, steps: job.show(step=step, steps=steps)
        try:
            output = self.pipe(**arguments, **watched)
        except (WorkerError, LaunchError):
            self.state = "lost"
            raise
        finally:
            self.pipe.on_step = None
        self.state = "ready"
        return output

    def _set_plan(self, plan: Any) -> None:
        if plan != self._plan:
            self.pipe.plan = plan
            self._plan = plan

    def _tokens(self, prompt: str) -> int:
        """Return the number of tokens of a prompt by the pipeline's first tokenizer; 0 if none takes a plain text."""
        if not callable(self._tokenizer):
            return 0
        return len(self._tokenizer(prompt)["input_ids"])


def _after_step(job: Job, *_: Any) -> dict[str, Any]:
    """Be a callback_on_step_end that changes nothing. Raises Cancelled if the job was cancelled."""
    job.check()
    return {}


def _image_of(output: Any) -> Any:
    images = getattr(output, "images", None)
    if not images:
        raise PlanError(f"this model returns {type(output).__name__}, which has no images")
    return images[0]
