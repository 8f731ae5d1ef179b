"""What the jobs of a server do: calls of its generator, of which the server learns seconds and counts what happens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from patchpar.errors import LaunchError, RetriesExhausted, WorkerDied, WorkerError, WorkerHung
from patchpar.pipeline.report import Run
from patchpar.serving.generated import GeneratedImages, GeneratedVideo
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.job import Cancelled, Job, Suspended
from patchpar.serving.metrics import ServerMetrics
from patchpar.serving.out_of_memory import is_out_of_memory
from patchpar.serving.partial_images import ImageFigures
from patchpar.serving.refusals import refused_calls_named
from patchpar.serving.request_error import RequestError
from patchpar.serving.scheduler import check_not_late
from patchpar.serving.scheduling.learnt_costs import LearntCosts

LOST = (WorkerDied, WorkerHung, RetriesExhausted)
"""Of a request that has lost a worker, and does not go on."""
T = TypeVar("T")


class ServedCalls:
    """Calls of one generator. `repair` is called with a number of ranks of which some have been lost."""

    def __init__(
        self,
        generator: ImageGenerator,
        costs: LearntCosts,
        metrics: ServerMetrics,
        repair: Callable[[int], object],
    ) -> None:
        self._generator, self._costs, self._metrics, self._repair = generator, costs, metrics, repair

    def images(self, job: Job) -> GeneratedImages:
        """Make the images of a request, and of those that have joined it. Raises what the generator raises."""
        if job.peers:
            return self._batch(job)
        self._check_not_late(job)
        images = self._run(job, lambda: self._generator.generate(job, job.source.call.decoded()))
        self._ended(job, images.runs, images.figures)
        return images

    def video(self, job: Job) -> GeneratedVideo:
        """Make the video of a request. Raises what the generator raises."""
        self._check_not_late(job)
        video = self._run(job, lambda: self._generator.generate_video(job, job.source.call.decoded()))
        self._ended(job, [video.run], [video.figures])
        return video

    def _batch(self, job: Job) -> GeneratedImages:
        """Make the images of a job and of those that have joined it. Each has an event of its own image.

        One that is late ends alone: if it is the job itself, the others wait again.
        """
        self._check_not_late(job)
        joined = (job, *(peer for peer in job.peers if not self._ends_late(peer)))
        calls = [each.source.call for each in joined]
        try:
            made = self._run(job, lambda: self._generator.generate_batch(job, calls))
        except (Cancelled, Suspended):
            raise  # those who have joined wait again
        except Exception as error:
            if is_out_of_memory(error):
                for each in joined:
                    each.facts = replace(each.facts, batch_key=None)  # alone it may fit
                raise Suspended from error
            for peer in joined[1:]:
                peer.fail(error)
            raise
        self._metrics.batches.observe(len(made))
        for each, images in zip(joined, made, strict=True):
            each.send(images.completed[0])
            if each is not job:
                self._metrics.observe(each.queued_seconds, each.facts.shape.pixels, ())  # the call is counted once
                each.finish(images)
        self._ended(job, made[0].runs, made[0].figures, is_alone=len(joined) == 1)
        return made[0]

    def _ended(self, job: Job, runs: Sequence[Run], figures: Sequence[ImageFigures], *, is_alone: bool = True) -> None:
        """Count and learn. Costs are those of a request that is made alone and at one go: others tell nothing of it."""
        shape, own = job.facts.shape, figures[len(figures) - len(runs) :]
        self._metrics.observe(job.queued_seconds, shape.pixels, runs)
        self._metrics.recoveries.labels("recovered").inc(sum(each.recovered for each in own))
        for run, each in zip(runs, own, strict=True) if is_alone and not job.suspensions else ():
            if not each.recovered:  # on fewer devices, and twice in part
                self._costs.observe(shape, job.takes, run.steps, run.seconds)

    def _run(self, job: Job, generate: Callable[[], T]) -> T:
        try:
            with refused_calls_named(self._generator.scheduler, job.source.call.arguments):
                return generate()
        except Suspended:
            self._metrics.suspensions.inc()
            raise
        except (WorkerError, LaunchError) as error:
            if isinstance(error, LOST):
                self._metrics.recoveries.labels("failed").inc()
            self._repair(job.takes)
            raise

    def _check_not_late(self, job: Job) -> None:
        try:
            check_not_late(job)
        except RequestError:
            self._metrics.missed_deadlines.inc()
            raise

    def _ends_late(self, job: Job) -> bool:
        """Return whether a job that has joined another one is late; it ends then."""
        try:
            self._check_not_late(job)
        except RequestError as error:
            job.fail(error)
            return True
        return False
