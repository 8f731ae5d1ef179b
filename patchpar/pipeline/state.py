"""The state of a `ParallelPipeline`, in a separate object, so that its other attributes can be the pipeline's."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.executor import Executor
from patchpar.launch.fork_guard import change_in_children
from patchpar.launch.local import LocalExecutor
from patchpar.models.adapters import from_safetensors
from patchpar.models.info import PipelineInfo
from patchpar.pipeline.auto_weights import WeightChoice
from patchpar.pipeline.caller import CallController
from patchpar.pipeline.messages import CallbackChange, MethodResult
from patchpar.pipeline.report import Run
from patchpar.pipeline.startup import PipelineOptions
from patchpar.pipeline.state_changes import engine_call
from patchpar.pipeline.timed_plans import TimedPlans
from patchpar.plan.plan import Plan

log = logging.getLogger(__name__)


class PipelineState:
    """The requested options, the ranks and their model, and the latest call."""

    def __init__(self, request: PipelineOptions) -> None:
        self.request, self.wanted = request, request.plan
        self.executor: Executor | None = None
        self.timed = TimedPlans(None, {}, ())
        self.model: PipelineInfo | None = None
        self.plan: Plan | None = None
        self.weights = WeightChoice()  # with plan="auto"
        self.reason = ""
        self._advice: set[str] = set()  # what has been logged
        self.last_run: Run | None = None
        self.on_step: Callable[[int, int], object] | None = None
        self.progress: dict[str, Any] = {}
        self.tracing = False
        self.is_fresh = False  # loaded from files, and no network passed as an option
        self.caller: CallController | None = None
        self.lock = threading.RLock()
        change_in_children(self)

    def after_fork(self) -> None:
        self.lock = threading.RLock()

    @property
    def ranks(self) -> Executor:
        """The ranks. Raises PlanError if the pipeline is closed."""
        if self.executor is None:
            raise PlanError("this pipeline is closed; make a new one")
        return self.executor

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the engine on every rank; return rank 0's result, under torchrun that of this process."""
        ranks = self.ranks
        everywhere = ranks.kind != "local"
        results = ranks.call(method, *args, everywhere=everywhere, **options)
        return results[getattr(ranks, "rank", 0)]

    def advise(self, advice: str) -> None:
        """Log advice, unless it is empty or has been logged before."""
        if advice and advice not in self._advice:
            self._advice.add(advice)
            log.warning("%s", advice)

    def apply(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MethodResult:
        """Call a method of the pipeline or of one of its networks on every rank. Raises PlanError for pickles."""
        words, options = engine_call(path, args, from_safetensors(path, args, kwargs), is_fresh=self.is_fresh)
        return self.ask(*words, **options)

    def keep(self, changes: Iterable[CallbackChange]) -> None:
        """Repeat the changes that a callback made to networks on workers that start later."""
        if not isinstance(self.ranks, LocalExecutor):
            return  # other executors never restart ranks
        for change in changes:
            if change.kwargs is not None:
                words, options = engine_call(change.path, change.args, change.kwargs, is_fresh=self.is_fresh)
                self.ranks.remember(*words, **options)
            elif change.is_of_networks:
                self.ranks.remember("set", change.path, *change.args, replay=change.path)

    @property
    def described(self) -> PipelineInfo:
        """The description of a loaded pipeline."""
        assert self.model is not None, "a pipeline is described as soon as it is loaded"
        return self.model
