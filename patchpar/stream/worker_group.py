"""The ranks of a pipeline that streams: started with their model, restarted when one dies, without failed devices."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from patchpar.errors import LaunchError, PlanError, WorkerError
from patchpar.launch.accelerators import is_accelerator
from patchpar.launch.devices import RAY
from patchpar.launch.executor import OnEvent, OnStart, SendToRank
from patchpar.launch.hang_detection import LOAD_SECONDS
from patchpar.launch.inline import InlineExecutor
from patchpar.launch.local import LocalExecutor
from patchpar.models.size_grid import check_side
from patchpar.models.streaming.config import StreamConfig
from patchpar.models.streaming.fifo.queue import FifoConfig
from patchpar.models.streaming.model_facts import ModelFacts
from patchpar.plan.scalars import is_whole, plain
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.base_session import LOST, BaseSession, Closing
from patchpar.stream.delivery import StreamFormat
from patchpar.stream.messages import ProducedBlock, StreamRun
from patchpar.stream.session import StreamSession

Ranks = LocalExecutor | InlineExecutor
ENGINE = "patchpar.stream.causal.runner:StreamRunner"
PATIENCE = 2
"""Deaths of one rank without a finished block between them, after which its device is left out."""
SOON = 1.0
"""Seconds that a cancelled stream has to free its ranks before they are ended, and a stream after that."""
R = TypeVar("R", bound="Ranks | WorkerGroup")
S = TypeVar("S", bound=BaseSession[Any, Any])
C = TypeVar("C", StreamConfig, FifoConfig)
V = TypeVar("V", bound=StreamSession)
BF16 = "bfloat16"
"""That of the released models; a transformer of 14 billion weights in float32 takes 56 GB on each rank."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoading:
    """What the ranks load, with which runner class (`engine`), and on which devices. `deadline` in seconds."""

    folder: str
    config: StreamConfig | FifoConfig
    options: Mapping[str, Any]
    devices: tuple[str, ...]
    deadline: float
    engine: str = ENGINE

    def start(self, plan: StreamPlan, devices: Sequence[str]) -> tuple[Ranks, ModelFacts]:
        """Start ranks on the first of `devices` and load. Raises LaunchError, PlanError, UnsupportedModel."""
        asked = (self.folder, self.config, plan, self.options)
        return start_ranks(devices[: plan.ranks], self.engine, self.deadline, asked)


def with_default_dtype(options: Mapping[str, Any], devices: Sequence[str]) -> dict[str, Any]:
    """Return options of from_pretrained with bfloat16 on accelerators, where they name no dtype."""
    names_one = any(options.get(name) is not None for name in ("dtype", "torch_dtype"))
    return dict(options) if names_one or not all(map(is_accelerator, devices)) else {**options, "torch_dtype": BF16}


def start_ranks(names: Sequence[str], engine: str, deadline: float, asked: Sequence[Any]) -> tuple[Ranks, Any]:
    """Start ranks and `load` `asked`: them and rank 0's result. `deadline`: seconds that a rank may stall.

    Raises LaunchError, PlanError, UnsupportedModel.
    """
    executor: Ranks
    if len(names) == 1 and RAY not in names:
        executor = InlineExecutor(names[0], engine, deadline=deadline)
    else:
        executor = LocalExecutor(
            names, engine, deadline=deadline, preload=[engine.partition(":")[0]], one_by_one=True, has_group=False
        )
    try:
        return executor, executor.call("load", *asked, replay=True, expected=LOAD_SECONDS)[0]
    except BaseException:
        executor.close()
        raise


class WorkerGroup:
    """Ranks that follow `plan`. `loading`: what they have loaded, and restarts them on other devices."""

    def __init__(self, ranks: Ranks, plan: StreamPlan, loading: ModelLoading) -> None:
        self._ranks, self.plan, self.loading = ranks, plan, loading
        self._devices = loading.devices
        self._deaths = Counter[int | None]()  # by rank, since the last block; None: of one that is not known
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank; empty where the only rank is this process."""
        return getattr(self._ranks, "pids", ())

    def run(self, run: StreamRun, on_event: OnEvent, on_start: OnStart) -> list[Any]:
        """Run on all ranks. Raises WorkerError when a rank dies; the next call runs on restarted ranks."""

        def receive(rank: int, event: Any) -> None:
            if isinstance(event, ProducedBlock):
                self._deaths.clear()
            on_event(rank, event)

        while True:
            self._do_without_failing()
            try:
                return self._ranks.call(
                    "run", run, on_event=receive, on_start=lambda send: on_start(partial(self._send_within_plan, send))
                )
            except LOST as error:
                self._deaths[error.rank] += 1
                raise
            except LaunchError as error:
                if not self._do_without(rank_at_fault(error)):
                    raise

    def _send_within_plan(self, send: SendToRank, rank: int, value: Any) -> None:
        """Send a message to a rank; to those beyond the plan, which may have become smaller, none."""
        if rank < self.plan.ranks:
            send(rank, value)

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._is_closed = True
        self._ranks.close()

    def _do_without_failing(self) -> None:
        """Restart without the device of a rank that has died PATIENCE times. Raises LaunchError if it fails."""
        for rank in [rank for rank, deaths in self._deaths.items() if deaths >= PATIENCE]:
            if self._do_without(rank):
                return  # the other ranks have other numbers now

    def _do_without(self, rank: int | None) -> bool:
        """Restart without the device of `rank`; returns whether that was possible. Raises LaunchError if it fails."""
        while not self._is_closed:
            failed = self.plan.ranks - 1 if rank is None else rank
            lost, devices = self._devices[failed], (*self._devices[:failed], *self._devices[failed + 1 :])
            plan = within(self.plan, len(devices))
            if plan is None:
                return False
            log.warning("device %s has failed; the stream continues with %s", lost, plan)
            self._ranks.close()
            self.plan, self._devices = plan, devices
            self._deaths.clear()
            try:
                self._ranks, _ = self.loading.start(plan, devices)
            except LaunchError as error:
                rank = rank_at_fault(error)
                if within(plan, len(devices) - 1) is None:
                    raise
                continue
            if not self._is_closed:
                return True
            self._ranks.close()  # `close`, in another thread, had those before
        return False


def rank_at_fault(error: BaseException | None) -> int | None:
    """Return the rank that an error, or one of its causes, names; None if none does."""
    while error is not None:
        if isinstance(error, WorkerError) and error.rank is not None:
            return error.rank
        error = error.__cause__
    return None


def within(plan: StreamPlan, devices: int) -> StreamPlan | None:
    """Return a plan for the same steps on as many of `devices` as possible, at most its ranks; None if impossible."""
    for ranks in range(min(plan.ranks, devices), 0, -1):
        try:
            return plan if ranks == plan.ranks else StreamPlan.even(plan.steps, ranks)
        except PlanError:
            continue  # not a whole number of ranks for each step
    return None


class HeldRanks(Closing, Generic[R, S]):
    """Ranks with at most one stream on them."""

    def __init__(self, ranks: R) -> None:
        self._ranks: R | None = ranks
        self._session: S | None = None
        self._beginning = threading.Lock()

    @contextmanager
    def _begun(self) -> Iterator[R]:
        """Give the ranks to another stream, which has to be there at the end of the block. One thread after another.

        Raises PlanError if a stream is running on them, or they are closed.
        """
        with self._beginning:
            if self._ranks is None:
                raise PlanError("this pipeline is closed; make a new one")
            if self._session is not None and not self._session.is_over:
                raise PlanError("a stream is running on these ranks: close it first, or make another pipeline")
            if self._session is not None:
                self._session.close()
            yield self._ranks

    @property
    def is_computing(self) -> bool:
        """Whether the stream still runs after `close`: on a device in this process, where a step cannot be ended."""
        return self._session is not None and not self._session.is_free_within(0)

    def close(self, *, wait: bool = True) -> None:
        """End the stream and the workers, also in the middle of a step. Idempotent.

        Where the only rank is this process, its step is waited for, unless `wait` is False: then `is_computing` says
        whether it goes on. Raises PlanError after a minute.
        """
        ranks, self._ranks = self._ranks, None
        try:
            if self._session is not None:
                self._session.cancel()
                self._session.is_free_within(SOON)
        finally:
            if ranks is not None:
                ranks.close()
        if self._session is not None and (wait or self._session.is_free_within(SOON)):
            self._session.close()


class VideoStreamingPipeline(HeldRanks[WorkerGroup, V], Generic[C, V]):
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

    def _stream_run(self, seed: int, *, adapt_sink: bool, settles: int | None = None) -> StreamRun:
        """See StreamRun. Raises PlanError for a seed that torch does not take, and for sides of no whole latents."""
        for name in ("height", "width"):
            check_side(name, getattr(self.config, name), self._facts.spatial)
        known = plain(seed)
        if not is_whole(known, 0, 2**64 - 1):
            raise PlanError(f"seed={seed}: it must be a whole number of at least 0 and below 2**64")
        return StreamRun(
            ranks=self.plan.ranks,
            seed=known,
            rows=self.config.height // self._facts.spatial,
            columns=self.config.width // self._facts.spatial,
            first_block=0,
            adapt_sink=adapt_sink,
            settles=settles,
        )
