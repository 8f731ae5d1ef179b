"""One call of the pipeline on one rank: its random numbers, its steps, its callback. The pipeline runs untouched.

caller                       rank
  | <-- ("step", 3, 30) ------ |     scheduler.step has returned
  | <-- StepEnd -------------- |     the caller has a callback_on_step_end
  | --- CallbackResult ----------> |     every rank takes it
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.launch.executor import RankContext
from patchpar.models.ip_adapters import looked_at
from patchpar.pipeline.heartbeat_hooks import HeartbeatHooks
from patchpar.pipeline.messages import CallbackChange, CallbackResult, CallOptions, RandomState, StepEnd
from patchpar.pipeline.stats_recorder import StatsRecorder
from patchpar.plan.step_clock import StepClock
from patchpar.shard.generators import generators_of
from patchpar.shard.hooks import HookSet
from patchpar.strategies.scheduler_step import SchedulerStepOverride, Step

PLAIN = (bool, int, float, str, type(None))
BAR = "_progress_bar_config"  # as diffusers keeps it


class PipelineCall:
    """One call. `steps` counts those of the scheduler; the `recorder` hears of each.

    `apart` is entered while the caller is asked; `changing` is called before its callback changes networks.
    """

    def __init__(
        self,
        pipe: Any,
        context: RankContext,
        clock: StepClock,
        options: CallOptions,
        recorder: StatsRecorder,
        apart: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.pipe, self.context, self.clock, self.options = pipe, context, clock, options
        self.recorder, self.apart, self.steps = recorder, apart, 0
        self.changing: Callable[[], object] = lambda: None
        self._stepped_by_copy = False  # of the scheduler, before itself

    def run(self, kwargs: Mapping[str, Any]) -> Any:
        """Call the pipeline."""
        arguments = dict(kwargs)
        if self.options.has_callback:
            arguments["callback_on_step_end"] = self._ask_callback
        with ExitStack() as stack:
            stack.enter_context(self._stepping())
            if self.context.world_size > 1:  # somebody watches
                stack.enter_context(HeartbeatHooks(self.pipe, self.context.beat))
            if self.options.quiet or self.context.rank > 0:
                stack.enter_context(_no_progress_bar(self.pipe))
            return self.pipe(**arguments)

    def _ask_callback(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """The caller's callback runs where the caller is; all ranks take its answer."""
        first = self.context.rank == 0
        question = StepEnd(step=step, timestep=timestep, tensors=tensors, facts=facts_of(pipe)) if first else None
        with self.apart():
            answer: CallbackResult = self.context.ask(question)
        if any(change.is_of_networks for change in answer.changes):
            self.changing()
        for change in answer.changes:
            carry_out(pipe, change)
        return {name: _moved(value, tensors.get(name)) for name, value in answer.tensors.items()}

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Tick the clock whenever the scheduler steps, if it does by that name; rank 0 tells the caller."""
        scheduler: Any = getattr(self.pipe, "scheduler", None)
        if not hasattr(scheduler, "step"):
            yield
            return

        def stepped(step: Step, *args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if not self._stepped_by_copy:
                self._stepped(scheduler)
            self._stepped_by_copy = False
            return result

        def copy_stepped(step: Step, *args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if self.clock.call >= 0:  # what was predicted at once is one step, however many schedulers take it
                self._stepped_by_copy = True
                self._stepped(scheduler)
            return result

        scheduler.step = SchedulerStepOverride(scheduler, stepped, copy_stepped)
        try:
            yield
        finally:
            del scheduler.step

    def _stepped(self, scheduler: Any) -> None:
        self.clock.tick()
        self.recorder.end_step()
        self.steps += 1
        self.context.beat(f"step {self.steps}")
        if self.context.rank == 0:
            self.context.emit(("step", self.steps, _total_steps(self.pipe, scheduler)))


def carry_out(pipe: Any, change: CallbackChange) -> None:
    """Do to the pipeline what the caller's callback did. Raises UnsupportedModel, and what the pipeline raises."""
    if change.path == "scheduler":
        raise UnsupportedModel(
            "pipe.scheduler cannot be replaced in callback_on_step_end, since the steps under way are its own: set it "
            "between two calls of the pipeline"
        )
    if change.kwargs is None:
        owner, _, name = change.path.rpartition(".")
        setattr(attrgetter(owner)(pipe) if owner else pipe, name, change.args[0])
        return
    method = attrgetter(change.path)(pipe)
    args, kwargs = looked_at(method, change.args, change.kwargs)
    returned = method(*args, **kwargs)
    if returned is not None and returned is not getattr(method, "__self__", None):
        raise UnsupportedModel(
            f"pipe.{change.path}() returned a {type(returned).__name__}, which a callback cannot have, because the "
            "ranks are busy: call it between two calls of the pipeline"
        )


def facts_of(pipe: Any) -> dict[str, Any]:
    """The pipeline's own attributes of plain types, such as `num_timesteps` or `_guidance_scale`."""
    public = {name for name in dir(type(pipe)) if isinstance(getattr(type(pipe), name), property)}
    names = [name for name in (*vars(pipe), *public) if not name.startswith("__")]
    found = {name: _attribute(pipe, name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, PLAIN)}


def _attribute(pipe: Any, name: str) -> Any:
    try:
        return getattr(pipe, name)
    except Exception:  # noqa: BLE001  a property may need what this call does not have
        return ...


def _total_steps(pipe: Any, scheduler: Any) -> int:
    timesteps = getattr(scheduler, "timesteps", None)
    count = getattr(pipe, "_num_timesteps", None)
    return int(count) if isinstance(count, int) else (len(timesteps) if timesteps is not None else 0)


def _moved(value: Any, like: Any) -> Any:
    return value.to(like.device) if isinstance(value, Tensor) and isinstance(like, Tensor) else value


@contextmanager
def _no_progress_bar(pipe: Any) -> Iterator[None]:
    """Neither of a pipeline nor of those that it is made of, as Kandinsky's combined ones are."""
    with_bars = [pipe, *(each for each in vars(pipe).values() if hasattr(each, "set_progress_bar_config"))]
    with HookSet() as hooks:
        for each in with_bars:
            hooks.replace(each, BAR, {**(vars(each).get(BAR) or {}), "disable": True})
        yield


def take_random_state(state: RandomState, device: torch.device) -> None:
    """Stand where the caller stands, so that no generator means what it means in plain diffusers.

    A rank on a GPU draws from the state of the caller's GPU if there is one, else from a seed out of its CPU state.
    """
    if state.seed is not None:
        torch.manual_seed(state.seed)
        return
    torch.set_rng_state(state.cpu)
    if device.type != "cuda":
        return
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, device)
    else:
        torch.cuda.manual_seed(int(torch.randint(2**62, ())))


def random_state(device: torch.device) -> RandomState:
    """Where this rank's default random numbers stand."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomState(cpu=torch.get_rng_state(), cuda=cuda)


class GeneratorStates:
    """Where the generators among a call's arguments stand, and the default one, so that it can be made again."""

    def __init__(self, kwargs: Mapping[str, Any], device: torch.device) -> None:
        self._device, self._generators = device, generators_of(kwargs)
        self._states = [generator.get_state() for generator in self._generators]
        self._default = random_state(device)

    def restore(self) -> None:
        """They stand there again."""
        take_random_state(self._default, self._device)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
