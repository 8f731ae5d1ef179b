"""Draw a picture for a page: steps and previews while it is made, the run's figures with the result."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from patchpar import ParallelPipeline, PlanError, Run, upscale

from .jobs import Job
from .orders import GenerateRequest
from .preview import ColourMap
from .ways import Preset
from .workers import AppWorkers

READY_STEPS = 4  # of the picture that is drawn when the page opens: it loads, verifies and shows what latents look like


@dataclass(frozen=True, slots=True, kw_only=True)
class JobImage:
    """What was drawn: a PIL picture, its exact values (H, W, 3) in 0..1 where they were asked for, and the run."""

    image: Any
    run: Run
    why: str
    values: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """`title`: what the page says meanwhile. `traced`: keep every event. `exact`: keep values beside the picture."""

    title: str = "drawing"
    traced: bool = True
    exact: bool = False


class ImageJobRunner:
    """Draws with the workers, and learns from every picture how to show the next while it is being made."""

    def __init__(self, workers: AppWorkers) -> None:
        self.workers = workers
        self.colours = ColourMap()

    def prepare(self, job: Job) -> None:
        """Start the workers and draw a little, so that the first real picture is as quick as those after it."""
        job.show(note="starting the workers and loading the model")
        pipe = self.workers.pictures(self.workers.ways[0])
        job.show(note="checking the split model against the plain one", steps=READY_STEPS)
        arguments = {"prompt": "a picture", "num_inference_steps": READY_STEPS}
        self._call(pipe, arguments, job, RunOptions(title="trying the model", traced=False))

    def draw(self, job: Job, order: GenerateRequest, way: Preset, manner: RunOptions | None = None) -> JobImage:
        """One picture. Raises PlanError, Cancelled, and what the pipeline raises."""
        manner = manner or RunOptions()
        job.check()
        job.show(note=manner.title, step=0, steps=order.steps)
        pipe = self.workers.pictures(way)
        arguments = order.arguments(pipe.description.parameters)
        if manner.exact:
            arguments["output_type"] = "np"
        return self._call(pipe, arguments, job, manner)

    def enlarge(self, job: Job, order: GenerateRequest, picture: Any, *, scale: float, strength: float) -> JobImage:
        """A PIL picture drawn again, `scale` times as large. Raises as `draw` does."""
        job.check()
        job.show(note="starting the workers that begin with a picture")
        pipe = self.workers.enlarging()
        arguments = order.arguments(set(pipe.description.parameters) - {"height", "width"})
        with self._watched(pipe, job, RunOptions(title="drawing it again")) as watched:
            larger = upscale(pipe, picture, scale=scale, strength=strength, **arguments, **watched.arguments)
        return _drawn_by(pipe, larger)

    def _call(self, pipe: ParallelPipeline, arguments: dict[str, Any], job: Job, manner: RunOptions) -> JobImage:
        with self._watched(pipe, job, manner) as watched:
            output = pipe(**arguments, **watched.arguments)
        image, values = picture_of(output)
        watched.teach(image)
        return _drawn_by(pipe, image, values)

    @contextmanager
    def _watched(self, pipe: ParallelPipeline, job: Job, manner: RunOptions) -> Iterator["WatchedCall"]:
        """While inside, a call of the pipeline is shown to the job's page."""
        has_callback = "callback_on_step_end" in pipe.description.parameters
        watched = WatchedCall(job, manner.title, self.colours, has_callback=has_callback)
        pipe.tracing, pipe.on_step = manner.traced, watched.count
        try:
            yield watched
        finally:
            pipe.on_step, pipe.tracing = None, False


def _drawn_by(pipe: ParallelPipeline, image: Any, values: Any = None) -> JobImage:
    assert pipe.last_run is not None
    return JobImage(image=image, values=values, run=pipe.last_run, why=pipe.explain())


class WatchedCall:
    """Shows the steps of one call. Cancelling ends it between two steps, and the workers stay as they are.

    Only the end of a step as the pipeline's callback sees it is such a place. A pipeline without callbacks is left in
    the middle of things instead, which costs its workers: they are started again for the next picture.
    """

    def __init__(self, job: Job, title: str, colours: ColourMap, *, has_callback: bool) -> None:
        self._job, self._title, self._colours, self._has_callback = job, title, colours, has_callback
        self._latents: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the call, so that its steps are seen."""
        return {"callback_on_step_end": self.after_step} if self._has_callback else {}

    def after_step(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """A callback_on_step_end. Raises Cancelled."""
        self._job.check()
        latents = tensors.get("latents")
        if latents is not None:
            self._latents = latents[0].detach().float().cpu().numpy()
            self._job.show(preview=self._colours.show(self._latents))
        return {}

    def count(self, step: int, steps: int) -> None:
        """A hook of `pipe.on_step`. Raises Cancelled where there is no callback to do so."""
        self._job.show(step=step, steps=steps, note=self._title)
        if not self._has_callback:
            self._job.check()

    def teach(self, image: Any) -> None:
        """The picture is done: this is what its last latents look like."""
        if self._latents is not None:
            self._colours.learn(self._latents, image)


def picture_of(output: Any) -> tuple[Any, Any]:
    """(PIL picture, exact values or None) of a pipeline's output. Raises PlanError for one that draws no pictures."""
    images = getattr(output, "images", None)
    if images is None:
        raise PlanError(f"this model returns {type(output).__name__}, which has no pictures: load one that draws them")
    first = images[0]
    if hasattr(first, "convert"):
        return first, None
    from patchpar.pipeline.image_metrics import as_picture

    return as_picture(first), first
