"""Base class of the pipelines that stream video: workers with their plan, and the setup of a stream."""

from typing import Generic, TypeVar

from patchpar.errors import PlanError
from patchpar.stream.config import StreamConfig
from patchpar.stream.delivery import StreamDelivery, StreamFormat
from patchpar.stream.driver import StreamLimits
from patchpar.stream.fifo.queue import FifoConfig
from patchpar.stream.messages import ModelFacts, StreamRun
from patchpar.stream.plan import StreamPlan
from patchpar.stream.session import StreamSession
from patchpar.stream.worker_group import HeldRanks, WorkerGroup

C = TypeVar("C", StreamConfig, FifoConfig)
S = TypeVar("S", bound=StreamSession)


class VideoStreamingPipeline(HeldRanks[WorkerGroup, S], Generic[C, S]):
    """`workers` that have loaded a model with the properties `facts`. `config`: how it is streamed."""

    def __init__(self, workers: WorkerGroup, config: C, facts: ModelFacts) -> None:
        super().__init__(workers)
        self._workers, self._facts = workers, facts
        self.config: C = config

    @property
    def plan(self) -> StreamPlan:
        """Which rank runs which steps, or zones. It changes if workers could not be restarted on all devices."""
        return self._workers.plan

    def _format(self, fps: float, frames: int) -> StreamFormat:
        """`frames`: latent frames per block."""
        config = self.config
        return StreamFormat(
            fps=fps, height=config.height, width=config.width, frames=frames, per_latent=self._facts.per_latent
        )

    def _limits(
        self, form: StreamFormat, delivery: StreamDelivery, seconds: float | None, queued: int = 0
    ) -> StreamLimits:
        """`queued`: blocks in flight beyond one in each stage."""
        credit = queued + self.plan.depth + delivery.lead
        return StreamLimits(credit=credit, blocks=form.blocks(seconds), restarts=delivery.restarts)

    def _stream_run(self, seed: int, *, adapt_sink: bool) -> StreamRun:
        """Raises PlanError for a seed that torch does not take."""
        if not 0 <= seed < 2**64:
            raise PlanError(f"seed={seed}: it must be at least 0 and below 2**64")
        return StreamRun(
            ranks=self.plan.ranks,
            seed=seed,
            rows=self.config.height // self._facts.spatial,
            columns=self.config.width // self._facts.spatial,
            first_block=0,
            adapt_sink=adapt_sink,
        )
