"""What a ParallelPipeline shows of its calls: statistics, finished steps, traces."""

from __future__ import annotations

from collections.abc import Callable

from patchpar.launch.host_memory import FreeMemory
from patchpar.pipeline.report import Run
from patchpar.pipeline.state import PipelineState


class ObservedCalls:
    """A pipeline whose calls can be observed."""

    _state: PipelineState

    @property
    def last_run(self) -> Run | None:
        """Statistics of the latest call."""
        return self._state.last_run

    def free_memory(self, rank: int, *, is_cancelled: Callable[[], bool] = lambda: False) -> FreeMemory:
        """Return the bytes that are free on the device of a rank, and on its host. Waits until the rank is free.

        Raises PlanError for a rank that does not exist, and as a call of the pipeline does for its worker: one that has
        ended is started again. `is_cancelled`: see `Executor.call`.
        """
        results = self._state.ranks.call("free_memory", ranks=(rank,), is_cancelled=is_cancelled)
        return results[0]  # others are of ranks that hold parts of the same model

    @property
    def slow_ranks(self) -> dict[int, float]:
        """Ranks that were slow in a recent job, and how many times as long as the others they took."""
        return self._state.slow_ranks.now

    @property
    def on_step(self) -> Callable[[int, int], object] | None:
        """Function called with (step, number of steps) after each step; replaces the progress bar."""
        return self._state.on_step

    @on_step.setter
    def on_step(self, function: Callable[[int, int], object] | None) -> None:
        self._state.on_step = function

    @property
    def tracing(self) -> bool:
        """Whether calls record every exchange, for `last_run.save_trace(path)`."""
        return self._state.tracing

    @tracing.setter
    def tracing(self, wanted: bool) -> None:
        self._state.tracing = bool(wanted)
