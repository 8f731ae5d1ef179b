"""Everything a `ParallelPipeline` knows, apart from it, so that its other attributes can be the pipeline's."""

import threading
from collections.abc import Callable
from typing import Any

from patchpar.launch.context import Executor
from patchpar.launch.forks import change_in_children
from patchpar.models.description import Description
from patchpar.outcome import Caller
from patchpar.plan import Plan
from patchpar.run import Run
from patchpar.start import Request


class State:
    """What was asked for, the ranks and their model, and the latest call."""

    def __init__(self, request: Request) -> None:
        self.request, self.wanted = request, request.plan
        self.executor: Executor | None = None
        self.model: Description | None = None
        self.plan: Plan | None = None
        self.reason = ""
        self.last_run: Run | None = None
        self.on_step: Callable[[int, int], object] | None = None
        self.progress: dict[str, Any] = {}
        self.tracing = False
        self.caller: Caller | None = None
        self.lock = threading.RLock()
        change_in_children(self)

    def after_fork(self) -> None:
        """See `launch.forks`."""
        self.lock = threading.RLock()

    @property
    def described(self) -> Description:
        """The model, of a pipeline that has been loaded."""
        assert self.model is not None, "a pipeline is described as soon as it is loaded"
        return self.model
