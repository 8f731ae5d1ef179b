"""The ranks of a stream: started with their model, the same again when one dies, without it when it cannot be had."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from patchpar.errors import LaunchError, PlanError, WorkerError
from patchpar.launch.executor import OnEvent, OnStart, Tell
from patchpar.launch.inline import InlineExecutor
from patchpar.launch.local import LocalExecutor
from patchpar.stream.config import StreamConfig
from patchpar.stream.fifo.config import FifoConfig
from patchpar.stream.messages import ModelFacts, ProducedBlock, StreamRun
from patchpar.stream.plan import StreamPlan

Ranks = LocalExecutor | InlineExecutor
ENGINE = "patchpar.stream.causal.runner:StreamRunner"
LOAD_SECONDS = 600.0
PATIENCE = 2
"""Deaths without a block between them, after which the device at fault is done without."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoading:
    """What ranks load, by which of the classes that run there, and on which devices they may."""

    folder: str
    config: StreamConfig | FifoConfig
    options: Mapping[str, Any]
    devices: tuple[str, ...]
    deadline: float
    engine: str = ENGINE

    def start(self, plan: StreamPlan, devices: Sequence[str]) -> tuple[Ranks, ModelFacts]:
        """Ranks on the first of `devices` that have loaded their part of `plan`.

        Raises LaunchError, PlanError, UnsupportedModel.
        """
        asked = (self.folder, self.config, plan, self.options)
        return start_ranks(devices[: plan.ranks], self.engine, self.deadline, asked)


def start_ranks(names: Sequence[str], engine: str, deadline: float, asked: Sequence[Any]) -> tuple[Ranks, Any]:
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


class WorkerStarter(Protocol):
    """How ranks are had: those that one pipeline's model needs."""

    @property
    def devices(self) -> tuple[str, ...]:
        """On which they may be; there may be more than a plan has ranks."""

    def start(self, plan: StreamPlan, devices: Sequence[str]) -> tuple[Ranks, ModelFacts]:
        """Ranks on the first of `devices`. Raises LaunchError."""


class WorkerGroup:
    """Ranks that follow `plan`. `starting`: how to have others; without it there are none."""

    def __init__(self, ranks: Ranks, plan: StreamPlan, starting: WorkerStarter | None = None) -> None:
        self._ranks, self.plan, self._starting = ranks, plan, starting
        self._devices = () if starting is None else starting.devices
        self._deaths = 0
        self._at_fault: int | None = None
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank; none where the only rank is this process."""
        return getattr(self._ranks, "pids", ())

    def run(self, run: StreamRun, on_event: OnEvent, on_start: OnStart) -> list[Any]:
        """One run, on all ranks. Raises WorkerError when a rank dies: the next run finds others there."""
        while True:
            if self._deaths >= PATIENCE:
                self._do_without(self._at_fault)
            heard, begun = self._hearing(on_event), self._beginning(on_start)
            try:
                return self._ranks.call("run", run, on_event=heard, on_start=begun)
            except WorkerError as error:
                self._deaths += 1
                self._at_fault = error.rank
                raise
            except LaunchError as error:
                if not self._do_without(rank_at_fault(error)):
                    raise

    def _hearing(self, on_event: OnEvent) -> OnEvent:
        def hear(rank: int, event: Any) -> None:
            if isinstance(event, ProducedBlock):
                self._deaths = 0
            on_event(rank, event)

        return hear

    def _beginning(self, on_start: OnStart) -> OnStart:
        """Ranks that are gone are not spoken to."""
        count = self.plan.ranks

        def begun(tell: Tell) -> None:
            on_start(lambda rank, value: tell(rank, value) if rank < count else None)

        return begun

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._is_closed = True
        self._ranks.close()

    def _do_without(self, rank: int | None) -> bool:
        """Others instead of the rank at fault, or fewer; whether that was possible. Raises LaunchError if it fails."""
        if self._starting is None or self._is_closed:
            return False
        while True:
            devices, lost = without(self._devices, self.plan.ranks - 1 if rank is None else rank)
            plan = within(self.plan, len(devices))
            if plan is None:
                return False
            log.warning("device %s cannot be had any more; the stream goes on with %s", lost, plan)
            self._ranks.close()
            self.plan, self._devices, self._deaths = plan, devices, 0
            try:
                self._ranks, _ = self._starting.start(plan, devices)
                return True
            except LaunchError as error:
                rank = rank_at_fault(error)
                if within(plan, len(devices) - 1) is None:
                    raise


def rank_at_fault(error: BaseException | None) -> int | None:
    """The rank that an error, or what led to it, accuses; None where it accuses none."""
    while error is not None:
        if isinstance(error, WorkerError) and error.rank is not None:
            return error.rank
        error = error.__cause__
    return None


def without(devices: Sequence[str], rank: int) -> tuple[tuple[str, ...], str]:
    """The devices but for that of `rank`, in their order; and that one."""
    return (*devices[:rank], *devices[rank + 1 :]), devices[rank]


def within(plan: StreamPlan, devices: int) -> StreamPlan | None:
    """The plan for the same steps on as many of `devices` as can be, and no more than it has ranks; None for none."""
    for ranks in range(min(plan.ranks, devices), 0, -1):
        try:
            return plan if ranks == plan.ranks else StreamPlan.even(plan.steps, ranks)
        except PlanError:
            continue  # not a whole number of ranks for each step
    return None
