"""`planned()` of a ParallelPipeline: what a call would take on this machine, without making it."""

from __future__ import annotations

from typing import Any

from patchpar.pipeline.state import PipelineState
from patchpar.pipeline.timed_plans import PlannedCall
from patchpar.pipeline.validate import bind, check_call


class PlannedCalls:
    """A pipeline whose calls can be planned."""

    _state: PipelineState

    def planned(self, *args: Any, **kwargs: Any) -> PlannedCall:
        """Return plan, reason and forecast of a call with these arguments, and the runners-up. Nothing is generated.

        For pipelines of a folder, on devices that `patchpar tune` has measured. Raises PlanError.
        """
        model = self._state.described
        bound = bind(model, args, kwargs)
        check_call(model, bound)
        return self._state.timed.planned(model, bound)
