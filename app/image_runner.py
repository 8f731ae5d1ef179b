"""Runs image jobs: progress and previews during generation, run statistics with the result."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from patchpar import ParallelPipeline, PlanError, Run, upscale
from patchpar.models.caption_words import caption_words, unknown_words
from patchpar.models.info import PipelineInfo
from patchpar.models.task import ANY_PROMPT
from patchpar.serving.latent_preview import ColourMap, grid_of

from .job_queue import Job
from .loras import LoadedLoras, text_of
from .presets import Preset
from .requests import GenerateRequest
from .workers import AppConfig, AppWorkers

READY_STEPS = 4  # of the first image, which loads and verifies the model and fits the preview


@dataclass(frozen=True, slots=True, kw_only=True)
class JobImage:
    """A PIL image, its exact values (H, W, 3) in 0..1 if requested, and the run.

    `unknown`: words of the prompt that the embedded model has not learnt.
    """

    image: Any
    run: Run
    why: str
    values: Any = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """`title`: shown as progress. `traced`: record all events. `exact`: return float values with the image."""

    title: str = "generating"
    traced: bool = True
    exact: bool = False


class ImageJobRunner:
    """Runs generation on the workers, and fits the latent preview to each result."""

    def __init__(self, workers: AppWorkers) -> None:
        self.workers = workers
        self.colours, self._loras = ColourMap(), LoadedLoras()

    def change_model(self, job: Job, setup: AppConfig) -> None:
        """Load another model and generate with it once; the first one comes back if that fails or is cancelled.

        Raises PlanError, LaunchError, Cancelled, and what the pipeline raises.
        """
        job.check()
        colours, self.colours = self.colours, ColourMap()  # its latents have other colours
        try:
            self.workers.change(setup, lambda: self.prepare(job))
        except BaseException:
            self.colours = colours
            raise

    def prepare(self, job: Job) -> None:
        """Start the workers and generate once, so that the first real image is as fast as later ones."""
        job.show(note="starting the workers and loading the model")
        pipe = self.workers.image_pipeline(self.workers.presets[0])
        job.check()
        job.show(note="verifying the split model against the plain one", steps=READY_STEPS)
        arguments = {"prompt": ANY_PROMPT, "num_inference_steps": READY_STEPS}
        self._call(pipe, arguments, job, RunOptions(title="warming up", traced=False))

    def generate(
        self, job: Job, request: GenerateRequest, preset: Preset, options: RunOptions | None = None
    ) -> JobImage:
        """One image. Raises PlanError, Cancelled, and what the pipeline raises."""
        options = options or RunOptions()
        job.check()
        job.show(note=options.title, step=0, steps=request.steps, seconds_left=None)
        pipe = self.workers.image_pipeline(preset)
        self._load(pipe, job, request)
        arguments = {**request.arguments(pipe.description.parameters), **own_arguments(pipe.description)}
        if options.exact:
            arguments["output_type"] = "np"
        known = caption_words(self.workers.setup.model)
        found = self._call(pipe, arguments, job, options)
        return replace(found, unknown=unknown_words(request.prompt, known))

    def upscale(self, job: Job, request: GenerateRequest, image: Any, *, scale: float, strength: float) -> JobImage:
        """Upscale a PIL image by `scale` with the model. Raises as `generate` does."""
        job.check()
        job.show(note="starting the image-to-image workers")
        pipe = self.workers.upscaler()
        self._load(pipe, job, request)
        arguments = request.arguments(set(pipe.description.parameters) - {"height", "width"})
        arguments |= own_arguments(pipe.description)
        with self.watched(pipe, job, RunOptions(title="upscaling"), image.size) as watched:
            larger = upscale(pipe, image, scale=scale, strength=strength, **arguments, **watched.arguments)
        return _job_image(pipe, larger)

    def edit(self, job: Job, request: GenerateRequest, image: Any, *, mask: Any, strength: float) -> JobImage:
        """Generate a PIL image anew, where `mask` is white, or all of it. Raises as `generate` does."""
        job.check()
        job.show(note=f"starting the workers for {'inpainting' if mask is not None else 'image-to-image'}")
        pipe = self.workers.upscaler() if mask is None else self.workers.inpainter()
        self._load(pipe, job, request)
        known = pipe.description.parameters
        sizes = {"height", "width"} if mask is None else set()  # of a call with a mask, which would resize both
        arguments = {**request.arguments(set(known) - sizes), **own_arguments(pipe.description), "image": image}
        arguments |= {"strength": strength} if "strength" in known else {}
        arguments |= {} if mask is None else {"mask_image": mask}
        return self._call(pipe, arguments, job, RunOptions(title="generating"))

    def _load(self, pipe: ParallelPipeline, job: Job, request: GenerateRequest) -> None:
        """Let the request's LoRAs act in the next call, and no others. Raises PlanError."""
        if request.loras:
            if not self.workers.may_change:
                raise PlanError("this page takes no LoRAs: they are for pages that other machines cannot reach")
            job.show(note=f"loading LoRA {text_of(request.loras)}")
        self._loras.prepare(pipe, request.loras)

    def _call(self, pipe: ParallelPipeline, arguments: dict[str, Any], job: Job, options: RunOptions) -> JobImage:
        with self.watched(pipe, job, options, _size_of(pipe.description, arguments)) as watched:
            output = pipe(**arguments, **watched.arguments)
        image, values = image_of(output)
        watched.fit_colours(image)
        return _job_image(pipe, image, values)

    @contextmanager
    def watched(
        self, pipe: ParallelPipeline, job: Job, options: RunOptions, size: tuple[int, int]
    ) -> Iterator["WatchedCall"]:
        """Report the steps of a pipeline call to the job's page. `size`: width and height of its image, in pixels."""
        has_callback = "callback_on_step_end" in pipe.description.parameters
        watched = WatchedCall(job, options.title, self.colours, size, has_callback=has_callback)
        pipe.tracing, pipe.on_step, pipe.on_latents = options.traced, watched.count, watched.receive
        try:
            yield watched
        finally:
            pipe.on_step, pipe.on_latents, pipe.tracing = None, None, False


def own_arguments(model: PipelineInfo) -> dict[str, Any]:
    """Arguments that a model is called with and that have no field: how long prompts of a distilled one may be."""
    length = None if model.few_steps is None else model.few_steps.max_sequence_length
    return {} if length is None or "max_sequence_length" not in model.parameters else {"max_sequence_length": length}


def _job_image(pipe: ParallelPipeline, image: Any, values: Any = None) -> JobImage:
    assert pipe.last_run is not None
    return JobImage(image=image, values=values, run=pipe.last_run, why=pipe.explain())


class WatchedCall:
    """Reports the steps of one call. Cancelling ends it between two steps, and the workers stay usable.

    This takes `callback_on_step_end`. A pipeline without callbacks is interrupted inside a step instead, which ends
    its workers: they are started again for the next image. `size`: width and height of the image, in pixels.
    """

    def __init__(self, job: Job, title: str, colours: ColourMap, size: tuple[int, int], *, has_callback: bool) -> None:
        self._job, self._title, self._colours, self._size = job, title, colours, size
        self._has_callback = has_callback
        self._latents: Any = None
        self._first: tuple[int, float] | None = None  # a step, and when it was finished

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the call that let it be cancelled."""
        return {"callback_on_step_end": self.after_step} if self._has_callback else {}

    def after_step(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """A callback_on_step_end. Raises Cancelled."""
        self._job.check()
        return {}

    def receive(self, step: int, steps: int, latents: Any) -> None:
        """A hook of `pipe.on_latents`: show the estimate of clean ones, and keep the last ones for `fit_colours`.

        `latents`: (1, ...), a grid or packed tokens.
        """
        self._latents = grid_of(latents.numpy(), self._size)
        if self._latents is not None:
            self._job.show(preview=self._colours.show(self._latents))

    def count(self, step: int, steps: int) -> None:
        """A hook of `pipe.on_step`. Raises Cancelled where there is no callback to do so."""
        self._job.show(step=step, steps=steps, note=self._title, seconds_left=self._seconds_left(step, steps))
        if not self._has_callback:
            self._job.check()

    def _seconds_left(self, step: int, steps: int) -> float | None:
        """By the mean of the steps after the first, which may allocate and verify; None before there is one."""
        now = time.monotonic()
        if self._first is None or step <= self._first[0]:  # also of a call that is made again
            self._first = step, now
            return None
        first, then = self._first
        return (now - then) / (step - first) * (steps - step)

    def fit_colours(self, image: Any) -> None:
        """Fit the preview to the finished image and its last latents."""
        if self._latents is not None:
            self._colours.fit(self._latents, image)


def _size_of(model: PipelineInfo, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Width and height of the image that a call makes, or of one in the same ratio."""
    if "width" in arguments:
        return arguments["width"], arguments["height"]
    if "image" in arguments:
        width, height = arguments["image"].size
        return width, height
    height, width = model.default_size or (1, 1)
    return width, height


def image_of(output: Any) -> tuple[Any, Any]:
    """(PIL image, exact values or None) of a pipeline's output. Raises PlanError where there are no images."""
    images = getattr(output, "images", None)
    if images is None:
        raise PlanError(
            f"this model returns {type(output).__name__}, which has no images: load a model that generates images"
        )
    first = images[0]
    if hasattr(first, "convert"):
        return first, None
    from patchpar.pipeline.image_metrics import as_image

    return as_image(first), first
