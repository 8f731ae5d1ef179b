"""The ranks of a stream: started with their model, the same again when one dies, fewer when they cannot be had."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from patchpar.errors import LaunchError, PlanError, WorkerError
from patchpar.launch.context import OnEvent, OnStart, Tell
from patchpar.launch.inline import InlineExecutor
from patchpar.launch.local import LocalExecutor
from patchpar.stream.config import StreamConfig
from patchpar.stream.plan import StreamPlan
from patchpar.stream.talk import Course, Facts, Produced

Ranks = LocalExecutor | InlineExecutor
ENGINE = "patchpar.stream.engine:StreamEngine"
LOAD_SECONDS = 600.0
PATIENCE = 2
"""Deaths without a block between them, after which there are to be fewer ranks."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What ranks load, and on which devices they may."""

    folder: str
    config: StreamConfig
    options: Mapping[str, Any]
    devices: tuple[str, ...]
    deadline: float

    def start(self, plan: StreamPlan) -> tuple[Ranks, Facts]:
        """Ranks that have loaded their part of `plan`. Raises LaunchError, PlanError, UnsupportedModel."""
        asked = (self.folder, self.config, plan, with_dtype(self.options))
        return start_ranks(self.devices[: plan.ranks], ENGINE, self.deadline, asked)


def start_ranks(names: Sequence[str], engine: str, deadline: float, asked: Sequence[Any]) -> tuple[Ranks, Facts]:
    """Ranks on these devices that have loaded what is `asked`, and what the first one says of it.

    Raises LaunchError, PlanError, UnsupportedModel.
    """
    executor: Ranks = InlineExecutor(names[0], engine, deadline=deadline)
    if len(names) > 1:
        executor = LocalExecutor(names, engine, deadline=deadline, preload=[engine.partition(":")[0]])
    try:
        return executor, executor.call("load", *asked, replay=True, expected=LOAD_SECONDS)[0]
    except BaseException:
        executor.close()
        raise


def with_dtype(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options with a dtype of torch's in place of its name."""
    dtype = options.get("torch_dtype")
    return {**options, "torch_dtype": getattr(torch, dtype)} if isinstance(dtype, str) else options


class Crew:
    """Ranks that follow `plan`. `start` gives others for another plan; without it there is none."""

    def __init__(
        self, ranks: Ranks, plan: StreamPlan, start: Callable[[StreamPlan], tuple[Ranks, Facts]] | None = None
    ) -> None:
        self._ranks, self.plan, self._start = ranks, plan, start
        self._deaths = 0
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank; none where the only rank is this process."""
        return getattr(self._ranks, "pids", ())

    def run(self, course: Course, on_event: OnEvent, on_start: OnStart) -> list[Any]:
        """One course, on all ranks. Raises WorkerError when a rank dies: the next course finds others there."""

        def hear(rank: int, event: Any) -> None:
            if isinstance(event, Produced):
                self._deaths = 0
            on_event(rank, event)

        def begun(tell: Tell) -> None:
            count = self.plan.ranks
            on_start(lambda rank, value: tell(rank, value) if rank < count else None)

        while True:
            if self._deaths >= PATIENCE:
                self._shrink()
            try:
                return self._ranks.call("run", course, on_event=hear, on_start=begun)
            except WorkerError:
                self._deaths += 1
                raise
            except LaunchError as error:
                self._shrink(error)

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._is_closed = True
        self._ranks.close()

    def _shrink(self, error: LaunchError | None = None) -> None:
        """Fewer ranks, if that is possible; raises `error` if it is not."""
        plan = None if self._start is None or self._is_closed else fewer(self.plan)
        if plan is None or self._start is None:
            if error is not None:
                raise error
            return
        log.warning("%d ranks cannot be had any more; the stream goes on with %s", self.plan.ranks, plan)
        self._ranks.close()
        try:
            self._ranks, _ = self._start(plan)
        except LaunchError as again:
            self.plan = plan
            self._shrink(again)
            return
        self.plan, self._deaths = plan, 0


def fewer(plan: StreamPlan) -> StreamPlan | None:
    """The plan for the same steps on as many ranks as can be, below those of `plan`."""
    for ranks in range(plan.ranks - 1, 0, -1):
        try:
            return StreamPlan.even(plan.steps, ranks)
        except PlanError:
            continue  # not a whole number of ranks for each step
    return None
