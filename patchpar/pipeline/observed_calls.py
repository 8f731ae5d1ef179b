"""What a ParallelPipeline shows of its calls: statistics, finished steps, traces, and what a call would take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.host_memory import FreeMemory
from patchpar.pipeline.notebook_html import html_of_plan
from patchpar.pipeline.report import Run
from patchpar.pipeline.state import PipelineState
from patchpar.pipeline.timed_plans import PlannedCall
from patchpar.pipeline.validate import bind, check_call


class ObservedCalls:
    """A pipeline whose calls can be observed, and planned."""

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

    def progress_bar(self, iterable: Any = None, total: int | None = None) -> Any:
        """Return a progress bar of this process with the options that are set, as in diffusers."""
        return self._state.progress_bar(iterable, total)

    @property
    def on_step(self) -> Callable[[int, int], object] | None:
        """Function called with (step, number of steps) after each step; replaces the progress bar."""
        return self._state.on_step

    @on_step.setter
    def on_step(self, function: Callable[[int, int], object] | None) -> None:
        if function is not None and not callable(function):
            raise PlanError(f"on_step={function!r:.80} is no function: give one of (step, steps), or None")
        self._state.on_step = function

    @property
    def on_latents(self) -> Callable[[int, int, Any], object] | None:
        """Function called with (step, number of steps, latents) after each step; jobs have `previews` of `submit`.

        Latents (1, ...) are those of the first image, in float32 on the CPU, as the pipeline gives them its scheduler:
        the scheduler's estimate of the clean ones if it has one, after the last step those that are decoded. With
        structure guidance on several ranks of torchrun they are whole in calls that have a callback_on_step_end.
        """
        return self._state.on_latents

    @on_latents.setter
    def on_latents(self, function: Callable[[int, int, Any], object] | None) -> None:
        self._state.on_latents = function

    @property
    def tracing(self) -> bool:
        """Whether calls record every exchange, for `last_run.save_trace(path)`."""
        return self._state.tracing

    @tracing.setter
    def tracing(self, wanted: bool) -> None:
        self._state.tracing = bool(wanted)

    def planned(self, *args: Any, **kwargs: Any) -> PlannedCall:
        """Return plan, reason and forecast of a call with these arguments, and the runners-up. Nothing is generated.

        For pipelines of a folder, on devices that `patchpar tune` has measured. Raises PlanError.
        """
        model = self._state.described
        bound = bind(model, args, kwargs)
        check_call(model, bound)
        return self._state.timed.planned(model, bound)

    def _repr_html_(self) -> str:
        """Return which rank has what under the plan, and the latest call, which notebooks show."""
        state = self._state
        title = repr(self).strip("<>")
        if state.executor is None:
            return html_of_plan(title, None, ())
        plan = html_of_plan(title, state.wanted or state.plan, state.request.devices.names)
        return plan if state.last_run is None else plan + state.last_run._repr_html_()
