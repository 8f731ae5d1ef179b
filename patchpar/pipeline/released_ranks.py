"""Ranks of a ParallelPipeline whose worker is ended for a while, so that others can use its device."""

from __future__ import annotations

from patchpar.errors import PlanError
from patchpar.launch.worker_executor import WorkerExecutor
from patchpar.pipeline.state import PipelineState


class ReleasedRanks:
    """A pipeline of which ranks can be released."""

    _state: PipelineState

    @property
    def can_release(self) -> bool:
        """Whether a worker can be ended while others keep theirs: not with NCCL, where they are started together."""
        ranks = self._state.ranks
        return isinstance(ranks, WorkerExecutor) and not ranks.has_groups and not self._state.divides_weights

    def release(self, rank: int) -> None:
        """End the worker of a rank once its call has ended; calls on all ranks leave it out from then on.

        A call that names the rank starts its worker again, and so does the next call on all ranks after `take_back`.
        Raises PlanError for a rank that does not exist, and where no worker can be ended alone.
        """
        self._workers().release(rank)

    def take_back(self, rank: int) -> None:
        """Let calls on all ranks bring a released rank in again. Raises PlanError as `release` does."""
        self._workers().take_back(rank)

    def _workers(self) -> WorkerExecutor:
        ranks = self._state.ranks
        if not self.can_release or not isinstance(ranks, WorkerExecutor):
            raise PlanError("no worker of this pipeline can be ended alone: close it, and open one with other devices")
        return ranks
