"""Everything a `ParallelPipeline` knows, apart from it, so that its other attributes can be the pipeline's."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.executor import Executor
from patchpar.launch.fork_guard import change_in_children
from patchpar.launch.local import LocalExecutor
from patchpar.models.adapters import from_safetensors
from patchpar.models.info import PipelineInfo
from patchpar.pipeline.caller import CallController
from patchpar.pipeline.messages import CallbackChange, MethodResult
from patchpar.pipeline.report import Run
from patchpar.pipeline.startup import PipelineOptions
from patchpar.pipeline.state_changes import asked
from patchpar.plan.plan import Plan


class PipelineState:
    """What was asked for, the ranks and their model, and the latest call."""

    def __init__(self, request: PipelineOptions) -> None:
        self.request, self.wanted = request, request.plan
        self.executor: Executor | None = None
        self.model: PipelineInfo | None = None
        self.plan: Plan | None = None
        self.reason = ""
        self.last_run: Run | None = None
        self.on_step: Callable[[int, int], object] | None = None
        self.progress: dict[str, Any] = {}
        self.tracing = False
        self.is_fresh = False  # began as its files have it
        self.caller: CallController | None = None
        self.lock = threading.RLock()
        change_in_children(self)

    def after_fork(self) -> None:
        """See `launch.forks`."""
        self.lock = threading.RLock()

    @property
    def ranks(self) -> Executor:
        """The ranks. Raises PlanError if the pipeline is closed."""
        if self.executor is None:
            raise PlanError("this pipeline is closed; make a new one")
        return self.executor

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of every rank's engine. Rank 0 answers; under torchrun each process answers itself."""
        ranks = self.ranks
        everywhere = ranks.kind != "local"
        results = ranks.call(method, *args, everywhere=everywhere, **options)
        return results[getattr(ranks, "rank", 0)]

    def apply(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MethodResult:
        """Call a method of the pipeline, or of one of its networks, on every rank. Raises PlanError for pickles."""
        words, options = asked(path, args, from_safetensors(path, args, kwargs), is_fresh=self.is_fresh)
        returned: MethodResult = self.ask(*words, **options)
        return returned

    def keep(self, changes: Iterable[CallbackChange]) -> None:
        """Have workers that start later do to networks what a callback has done during the call."""
        if not isinstance(self.ranks, LocalExecutor):
            return  # nothing is started anew
        for change in changes:
            if change.kwargs is not None:
                words, options = asked(change.path, change.args, change.kwargs, is_fresh=self.is_fresh)
                self.ranks.remember(*words, **options)
            elif change.is_of_networks:
                self.ranks.remember("set", change.path, *change.args, replay=change.path)

    @property
    def described(self) -> PipelineInfo:
        """The model, of a pipeline that has been loaded."""
        assert self.model is not None, "a pipeline is described as soon as it is loaded"
        return self.model
