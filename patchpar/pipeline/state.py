"""The state of a `ParallelPipeline`, in a separate object, so that its other attributes can be the pipeline's."""

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from patchpar.errors import LaunchError, PlanError
from patchpar.launch.executor import Executor
from patchpar.launch.fork_guard import change_in_children
from patchpar.launch.worker_executor import WorkerExecutor
from patchpar.models.adapters import from_safetensors
from patchpar.models.info import PipelineInfo, refuse_to_send_compiled
from patchpar.pipeline.attribute_copies import AttributeCopies
from patchpar.pipeline.auto_plan import PlanChoice, Rule
from patchpar.pipeline.auto_weights import WeightChoice
from patchpar.pipeline.caller import CallController
from patchpar.pipeline.caller_random import caller_random_state, set_generators
from patchpar.pipeline.component_proxy import network_of, refuse_value, with_part_names
from patchpar.pipeline.messages import EVERY_STEP, CallbackChange, CallOptions, MethodResult, Previews
from patchpar.pipeline.report import Run
from patchpar.pipeline.startup import PipelineOptions
from patchpar.pipeline.state_changes import engine_call
from patchpar.pipeline.stragglers import SlowRanks
from patchpar.pipeline.timed_plans import TimedPlans
from patchpar.pipeline.validate import check_plan_for, noise_of_first
from patchpar.plan.plan import Plan
from patchpar.shard.generators import generators_of
from patchpar.shard.torch_switches import TorchModes

log = logging.getLogger(__name__)
INTERRUPT = "_interrupt"
"""The attribute by which diffusers' pipelines leave out the steps that are left."""


class PipelineState:
    """The requested options, the ranks and their model, and the latest call."""

    def __init__(self, request: PipelineOptions) -> None:
        self.request, self.wanted = request, request.plan
        self.executor: Executor | None = None
        self.timed = TimedPlans(None, {}, ())
        self.slow_ranks, self.copies = SlowRanks(), AttributeCopies()
        self.seconds_alone: dict[int, float] = {}  # of a denoiser call, by rank, once it has been measured
        self.model: PipelineInfo | None = None
        self.plan: Plan | None = None
        self.weights = WeightChoice()  # with plan="auto"
        self.reason = ""
        self._advice: set[str] = set()  # what has been logged
        self.last_run: Run | None = None
        self.on_step: Callable[[int, int], object] | None = None
        self.on_latents: Callable[[int, int, Any], object] | None = None
        self.progress: dict[str, Any] = {}
        self.tracing = False
        self.is_fresh = False  # loaded from files, and no network passed as an option
        self._here = threading.local()  # the call that this thread makes
        self._in_calls: set[CallController] = set()
        self._formed: set[str] = set()
        self._installations: dict[int, tuple[int, frozenset[int]]] = {}  # number and ranks, by rank
        self._next_installation = itertools.count(1)
        self.turns = threading.RLock()  # of calls that are no jobs
        self._changes = threading.RLock()
        self._last_queued = set_event()
        change_in_children(self)

    def __reduce__(self) -> str:
        """Raise TypeError: this is what is found out when a ParallelPipeline is copied or pickled."""
        raise TypeError(
            "a ParallelPipeline has ranks of its own and can neither be copied nor sent to another process: create it "
            "there. What is sent to its ranks cannot use it either: set a cache that asks for pipe.current_timestep "
            "before ParallelPipeline(pipe)"
        )

    @property
    def previews(self) -> Previews | None:
        """What `on_latents` asks of calls that are no jobs."""
        return None if self.on_latents is None else Previews(count=EVERY_STEP, receive=self.on_latents)

    def after_fork(self) -> None:
        self.turns, self._changes = threading.RLock(), threading.RLock()
        self._last_queued, self._in_calls = set_event(), set()

    @property
    def ranks(self) -> Executor:
        """The ranks. Raises PlanError if the pipeline is closed."""
        if self.executor is None:
            raise PlanError("this pipeline is closed; make a new one")
        return self.executor

    @property
    def divides_weights(self) -> bool:
        """Whether each rank holds a part of the model, by the plan that was asked for, or with "auto"."""
        held = self.request.plan or self.weights.plan
        return held is not None and held.divides_weights

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the engine on every rank; return rank 0's result, under torchrun that of this process."""
        ranks = self.ranks
        everywhere = ranks.kind != "local"
        results = ranks.call(method, *args, everywhere=everywhere, **options)
        return results[getattr(ranks, "rank", 0)]

    def progress_bar(self, iterable: Any, total: int | None) -> Any:
        """Return a progress bar of diffusers in this process."""
        from diffusers import DiffusionPipeline

        return DiffusionPipeline.progress_bar(SimpleNamespace(_progress_bar_config=self.progress), iterable, total)

    def read(self, name: str) -> Any:
        """Return an attribute of the pipeline: with workers a copy, under torchrun that of this process."""
        value = self.ask("get", name)
        if self.ranks.kind == "local":
            self.copies.note(name, value)
        return value

    def check_set(self, name: str, value: Any) -> None:
        """Raise UnsupportedModel for compiled code, PlanError for what has no effect while workers are in a call."""
        if self.ranks.kind != "local":
            return
        refuse_value(name, value)
        refuse_to_send_compiled({name: value})
        if name == INTERRUPT and self._in_calls:
            raise PlanError(
                f"pipe.{INTERRUPT} is set when the ranks are free, which is after the call that they are in: set it in "
                "its callback_on_step_end, or make the call with submit() and end it with job.cancel()"
            )

    @property
    def caller(self) -> CallController | None:
        """The call that this thread makes; None outside of one."""
        return getattr(self._here, "caller", None)

    @contextmanager
    def calling(self, caller: CallController) -> Iterator[None]:
        """Make a call in this thread, and report its steps."""
        before, self._here.caller = self.caller, caller
        self._in_calls.add(caller)
        try:
            with caller.reporting(self.on_step, self.progress):
                yield
        finally:
            self._here.caller = before
            self._in_calls.discard(caller)

    def refuse_to_wait(self, timeout: float | None, *, is_over: bool) -> None:
        """Raise LaunchError if this thread makes a call: a job may need its ranks, or be that call.

        Not for a job that is over, nor with a `timeout` of 0 seconds, which only looks.
        """
        if self.caller is not None and not is_over and timeout != 0:
            raise LaunchError(
                "a function that is called during a call, such as a callback, cannot wait for a job, which may need "
                "the ranks of this call: do so when the current call has returned"
            )

    def wake(self) -> None:
        """Let calls that wait for ranks see whether they are cancelled."""
        if self.executor is not None:
            self.executor.wake()

    def follow(self, is_queued: threading.Event) -> threading.Event:
        """Return the event of the last call that was submitted, and keep that of this one."""
        with self._changes:
            before, self._last_queued = self._last_queued, is_queued
        return before

    def choose(self, rule: Rule, ranks: Sequence[int] | None, kwargs: Mapping[str, Any]) -> PlanChoice:
        """Return the plan with "auto" of a call on `ranks`, None for all, and the reason for it.

        May take minutes, where plans are searched for: other calls are submitted and end meanwhile.
        """
        choice = rule(self.described, self.ranks.world_size if ranks is None else len(ranks), kwargs, self.weights)
        if self.weights.plan is None and ranks is None:
            timed = self.timed.better(choice, self.described, kwargs)
            is_prefix = timed.ranks == tuple(range(len(timed.ranks)))
            choice = timed if is_prefix or self.ranks.kind == "local" else choice  # others keep their first ranks
        with self._changes:
            self.reason = choice.explanation
            self.advise(choice.advice)
        return choice

    def on_links(self, plan: Plan, ranks: tuple[int, ...], kwargs: Mapping[str, Any]) -> tuple[Plan, str]:
        """Return a plan that was asked for as the links between `ranks` need it, and the reason for it.

        Where each rank has a caller of its own it stays: they might have measured different links.
        """
        found = self.timed.overlapped(plan, ranks, kwargs) if self.ranks.kind == "local" else None
        return (plan, "as requested") if found is None else (found.plan, f"as requested, {found.reason}")

    def ended(self, run: Run, kwargs: Mapping[str, Any], *, busy: float | None) -> Run:
        """Keep the statistics of a call, and return them with its forecast. `busy`: see `TimedPlans.compared`."""
        with self._changes:
            self.plan, self.last_run = run.plan, self.timed.compared(run, kwargs, busy)
            return self.last_run

    def installation_on(self, ranks: Collection[int]) -> int:
        """Return the number of the installation on these ranks: a new one if one has worked with others since."""
        team = frozenset(ranks)
        with self._changes:
            found = {self._installations.get(rank) for rank in team}
            known = found.pop() if len(found) == 1 else None
            if known is None or known[1] != team:
                known = next(self._next_installation), team
                self._installations.update(dict.fromkeys(team, known))
            return known[0]

    def options_of(self, caller: CallController, plan: Plan, ranks: tuple[int, ...]) -> CallOptions:
        """Return the options of a call on these ranks. Raises PlanError if they cannot have the same noise."""
        devices, widths = self.ranks.devices, self.ranks.random_widths or (0,) * self.ranks.world_size
        of_ranks = [devices[rank] for rank in ranks], [widths[rank] for rank in ranks]
        noise = noise_of_first(caller.bound, plan, *of_ranks)
        installation = self.installation_on(ranks)
        options = caller.options(plan, ranks, self.request, installation=installation, tracing=self.tracing)
        return replace(options, noise_of_first=noise)

    def check(self, plan: Plan, ranks: Sequence[int], kwargs: Mapping[str, Any]) -> None:
        """Raise PlanError, and UnsupportedModel, for a plan that a call cannot have on the first of these ranks."""
        devices = [self.request.devices.names[rank] for rank in ranks[: plan.world_size]]
        check_plan_for(self.described, plan, kwargs, devices)

    def in_order(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return ranks as a call takes them: where operations of several ranks are prepared, in ascending order."""
        return tuple(sorted(ranks) if self.ranks.has_groups else ranks)

    def form_groups(self, plan: Plan, ranks: tuple[int, ...]) -> None:
        """Let all ranks prepare operations of those that a call is made on, where that takes all, and once for each."""
        name = f"groups of ranks {ranks} {plan.degrees()}"
        if self.ranks.has_groups and name not in self._formed:
            self.ranks.call("form", plan, ranks, symmetric_memory=self.request.symmetric_memory, replay=name)
            self._formed.add(name)

    def advise(self, advice: str) -> None:
        """Log advice, unless it is empty or has been logged before."""
        if advice and advice not in self._advice:
            self._advice.add(advice)
            log.warning("%s", advice)

    def apply(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MethodResult:
        """Call a method of the pipeline or of one of its networks on every rank. Raises PlanError for pickles."""
        args, kwargs = with_part_names(args, kwargs, self._part_name_of)
        words, options = engine_call(path, args, from_safetensors(path, args, kwargs), is_fresh=self.is_fresh)
        options["modes"] = TorchModes.now(of_process=self.ranks.kind == "local")
        if self.ranks.kind == "local":
            options["random"] = caller_random_state()
        elif self.ranks.kind == "torchrun":
            options["on_ask"] = _rank_0s  # the ranks agree on random states
        returned: MethodResult = self.ask(*words, **options)
        self.model = returned.described or self.model
        set_generators(generators_of(kwargs, args), returned.generators, returned.random)
        return returned

    def _part_name_of(self, value: Any) -> str | None:
        """Return the name of a part of the pipeline among the arguments of a method; None for other values."""
        return network_of(value, self) or self.copies.name_of(value)

    def keep(self, changes: Iterable[CallbackChange], ranks: Collection[int]) -> None:
        """Make the changes that a callback on `ranks` made to networks on all others, also those that start later."""
        if not isinstance(self.ranks, WorkerExecutor):
            return  # other executors never restart ranks, and call all of them
        others = [rank for rank in self.ranks.in_service if rank not in ranks]
        for change in changes:
            words: list[Any] = ["set", change.path, *change.args]
            options: dict[str, Any] = {"replay": change.path}
            if change.kwargs is not None:
                words, options = engine_call(change.path, change.args, change.kwargs, is_fresh=self.is_fresh)
            elif not change.is_of_networks:
                continue
            if others:
                self.ranks.call(*words, ranks=others, expected=options.get("expected", 0.0))
            self.ranks.remember(*words, **options)

    @property
    def described(self) -> PipelineInfo:
        """The description of a loaded pipeline."""
        assert self.model is not None, "a pipeline is described as soon as it is loaded"
        return self.model


def set_event() -> threading.Event:
    """Return an event that has happened."""
    event = threading.Event()
    event.set()
    return event


def _rank_0s(question: Any) -> Any:
    """Answer all ranks with what the first one has asked with."""
    return question
