"""One call of the pipeline on one rank: steps, callback. The pipeline's own code is not changed.

caller                       rank
  | <-- ("step", 3, 30) ------ |     scheduler.step has returned
  | <-- StepEnd -------------- |     the caller has a callback_on_step_end
  | --- CallbackResult ------> |     every rank applies it
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, device, nn

from patchpar.errors import UnsupportedModel
from patchpar.launch.executor import RankContext
from patchpar.models.empty_schedule import empty_schedules_refused
from patchpar.models.info import denoisers_of, networks_of
from patchpar.models.ip_adapters import with_checked_sources
from patchpar.pipeline.call_recorder import CallRecorder
from patchpar.pipeline.caller_values import with_embeddings_on
from patchpar.pipeline.clean_latents import clean_estimate, last_latents, latents_to_show
from patchpar.pipeline.decoded_preview import PreviewDecoder
from patchpar.pipeline.failed_calls import KeptNetworks, undone_after_failure
from patchpar.pipeline.failed_methods import with_parts
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.pipeline.messages import (
    CallbackChange,
    CallbackResult,
    CallOptions,
    PreviewEvent,
    StepEnd,
    preview_steps,
)
from patchpar.pipeline.stats_recorder import StatsRecorder
from patchpar.pipeline.step_callbacks import asking
from patchpar.plan.step_clock import StepClock
from patchpar.shard.compiled import is_compiled
from patchpar.shard.hooks import HookSet
from patchpar.shard.module_tree import named_modules_of
from patchpar.strategies.scheduler_step import SchedulerStepOverride, Step

PLAIN = (bool, int, float, str, type(None))
WALKING = ("device", "_execution_device", "dtype", "components", "parameters")
"""Properties of all pipelines that look at every module, which takes milliseconds, and are of no plain type."""
BAR = "_progress_bar_config"  # diffusers' attribute


class PipelineCall:
    """One call, with `installed` in its pipeline. `steps` counts scheduler steps; each is reported to `recorder`.

    `changing` is called before a callback changes networks.
    """

    def __init__(
        self,
        pipe: Any,
        context: RankContext,
        clock: StepClock,
        options: CallOptions,
        recorder: StatsRecorder,
        installed: InstalledPlan | None = None,
    ) -> None:
        self.pipe, self.context, self.clock, self.options = pipe, context, clock, options
        self.recorder, self.installed, self.steps = recorder, installed or InstalledPlan(), 0
        self.changing: Callable[[], object] = lambda: None
        self.calls: CallRecorder | None = None
        self._decoder: PreviewDecoder | None = None
        self._networks: KeptNetworks | None = None
        self._stepped_by_copy = False  # a copy of the scheduler has stepped before the scheduler itself

    def run(self, kwargs: Mapping[str, Any]) -> Any:
        """Call the pipeline, with the caller's switches and autocast. Networks keep nothing of a call that fails."""
        arguments = with_embeddings_on(device(self.context.device), kwargs)
        if self.options.has_callback:
            arguments |= asking(self.pipe, self._ask_callback)
        with ExitStack() as stack:
            stack.enter_context(self.options.modes.on(device(self.context.device).type))
            if self.options.decoded_previews:
                is_callers = self.context.world_size == 1
                self._decoder = PreviewDecoder(
                    self.pipe, self.options.plan, device(self.context.device), aside=self._aside, is_callers=is_callers
                )
                stack.enter_context(self._decoder.watching(arguments))
            stack.enter_context(self._stepping())
            stack.enter_context(PausePointHooks(self.pipe, self._pause_point))
            if self.calls is not None:
                stack.enter_context(self.calls.hooks_on(self.pipe))
            if self.context.world_size > 1:  # heartbeats are read
                stack.enter_context(HeartbeatHooks(self.pipe, self.context.beat))
            is_hidden = self.options.quiet or not self.context.is_first
            stack.enter_context(progress_bars(self.pipe, self.options.progress_bar, disable=is_hidden))
            self._networks = stack.enter_context(undone_after_failure(self.pipe, kwargs))
            stack.enter_context(empty_schedules_refused(self.pipe, arguments))
            return self.pipe(**arguments)

    def _aside(self) -> AbstractContextManager[None]:
        return nullcontext() if self.installed.vaes is None else self.installed.vaes.state.aside()

    def _pause_point(self) -> None:
        if self.calls is None:
            self.context.pause_point()
        else:
            self.calls.pass_pause_point(self.context.pause_point)

    def _ask_callback(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Run the caller's callback in the caller's process; all ranks apply its result."""
        question = None
        if self.context.is_first:
            question = StepEnd(step=step, timestep=timestep, tensors=tensors, facts=facts_of(pipe))
        with self.installed.interrupted():
            answer: CallbackResult = self.context.ask(question)
        of_networks = any(change.is_of_networks for change in answer.changes)
        if of_networks:
            self.changing()
        kept = self._networks if of_networks else None
        with nullcontext() if kept is None else kept.but_for_changes():
            for change in answer.changes:
                carry_out(pipe, change)
        return {name: _moved(value, tensors.get(name)) for name, value in answer.tensors.items()}

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Advance the clock at every scheduler.step, if there is that method; the first rank informs the caller."""
        scheduler: Any = getattr(self.pipe, "scheduler", None)
        if not hasattr(scheduler, "step"):
            yield
            return

        def stepped(step: Step, *args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if not self._stepped_by_copy:
                self._stepped(scheduler, args, kwargs, result)
            self._stepped_by_copy = False
            return result

        def copy_stepped(step: Step, *args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if self.clock.call >= 0:  # one prediction is one step, however many schedulers use it
                self._stepped_by_copy = True
                self._stepped(scheduler, args, kwargs, result)
            return result

        scheduler.step = SchedulerStepOverride(scheduler, stepped, copy_stepped)
        try:
            yield
        finally:
            del scheduler.step

    def _stepped(self, scheduler: Any, given: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        self.clock.tick()
        self.recorder.end_step()
        if self.calls is not None:
            self.calls.send_finished()
        self.steps += 1
        self.context.beat(f"step {self.steps}")
        total = _total_steps(self.pipe, scheduler)
        if self.context.is_first:
            self.context.emit(("step", self.steps, total))
            if self.steps in preview_steps(self.options.previews, total):
                is_last = self.steps == total
                latents = last_latents(result) if is_last else latents_to_show(scheduler, given, named, result)
                self.context.emit(PreviewEvent(step=self.steps, steps=total, preview=latents))
        if self._decoder is not None and self._is_decoded(total):
            image = self._decoder.image(scheduler, result, clean_estimate(scheduler, given, named, result))
            if self.context.rank == self.options.members[0]:  # others have a part of it
                self.context.emit(PreviewEvent(step=self.steps, steps=total, preview=image))

    def _is_decoded(self, total: int) -> bool:
        """Whether this step has a decoded preview. What is replayed has sent its own; the last step is the image."""
        is_replayed = self.calls is not None and self.calls.is_replaying
        wanted = preview_steps(self.options.decoded_previews, total)
        return self.steps in wanted and self.steps < total and not is_replayed


def carry_out(pipe: Any, change: CallbackChange) -> None:
    """Apply a callback's change to the pipeline. Raises UnsupportedModel, and what the pipeline raises."""
    if change.path == "scheduler":
        raise UnsupportedModel(
            "pipe.scheduler cannot be replaced in callback_on_step_end, since the current steps use it: set it between "
            "two calls of the pipeline"
        )
    if change.kwargs is None:
        owner, _, name = change.path.rpartition(".")
        setattr(attrgetter(owner)(pipe) if owner else pipe, name, change.args[0])
        return
    method = attrgetter(change.path)(pipe)
    args, kwargs = with_checked_sources(method, *with_parts(pipe, change.args, change.kwargs))
    returned = method(*args, **kwargs)
    if returned is not None and returned is not getattr(method, "__self__", None):
        raise UnsupportedModel(
            f"pipe.{change.path}() returned a {type(returned).__name__}, which a callback cannot get, because the "
            "ranks are busy: call it between two calls of the pipeline"
        )


def facts_of(pipe: Any) -> dict[str, Any]:
    """Return the pipeline's attributes of plain types, such as `num_timesteps` or `_guidance_scale`."""
    public = {name for name in dir(type(pipe)) if isinstance(getattr(type(pipe), name), property)}
    names = [name for name in (*vars(pipe), *public) if not name.startswith("__") and name not in WALKING]
    found = {name: _attribute(pipe, name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, PLAIN)}


def _attribute(pipe: Any, name: str) -> Any:
    try:
        return getattr(pipe, name)
    except Exception:  # noqa: BLE001  a property may need state that this call does not have
        return ...


def _total_steps(pipe: Any, scheduler: Any) -> int:
    timesteps = getattr(scheduler, "timesteps", None)
    count = getattr(pipe, "_num_timesteps", None)
    return int(count) if isinstance(count, int) else (len(timesteps) if timesteps is not None else 0)


def _moved(value: Any, like: Any) -> Any:
    return value.to(like.device) if isinstance(value, Tensor) and isinstance(like, Tensor) else value


@contextmanager
def progress_bars(pipe: Any, options: Mapping[str, Any] | None = None, *, disable: bool) -> Iterator[None]:
    """Give progress bars of a pipeline, and of pipelines and blocks inside it, these options, None for their own."""
    more = {"disable": True} if disable else {}
    with HookSet() as hooks:
        for each in _with_bars(pipe):
            own = vars(each).get(BAR) if options is None else options
            hooks.replace(each, BAR, {**(own or {}), **more})
        yield


def _with_bars(pipe: Any) -> Iterator[Any]:
    """Yield what shows a progress bar: a pipeline, those inside it, as in Kandinsky's combined ones, and blocks."""
    yield pipe
    yield from (each for each in vars(pipe).values() if hasattr(each, "set_progress_bar_config"))
    blocks_left = [getattr(pipe, "_blocks", None)]
    while blocks_left:
        block = blocks_left.pop()
        blocks_left += getattr(block, "sub_blocks", {}).values()
        if hasattr(block, "set_progress_bar_config"):
            yield block


class HeartbeatHooks(HookSet):
    """Heartbeats in all blocks of all networks of a pipeline, until `close`."""

    def __init__(self, pipe: Any, beat: Callable[[str], object]) -> None:
        super().__init__()
        for name, network in networks_of(pipe).items():
            for path, block in blocks(network):
                self.before(block, partial(_beat_at, beat, f"{name}.{path}"))


class PausePointHooks(HookSet):
    """A pause point before each call of a denoiser by the pipeline, until `close`; not in calls within it."""

    def __init__(self, pipe: Any, pause_point: Callable[[], object]) -> None:
        super().__init__()
        self._pause_point, self._depth = pause_point, 0
        for denoiser in denoisers_of(pipe).values():
            self.around(denoiser, self._begin_call, self._end_call)

    def _begin_call(self, *_: Any) -> None:
        if self._depth == 0:
            self._pause_point()
        self._depth += 1

    def _end_call(self, *_: Any) -> None:
        self._depth -= 1


def blocks(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return path and module of every element of a module list in `network`, except in compiled modules."""
    modules = named_modules_of(network)
    found = [
        (f"{path}.{name}".lstrip("."), block)
        for path, blocks_of_list in modules
        if isinstance(blocks_of_list, nn.ModuleList)
        for name, block in blocks_of_list.named_children()
    ]
    compiled = tuple(f"{path}." for path, module in modules if is_compiled(module))
    return [(path, block) for path, block in found if not f"{path}.".startswith(compiled)]


def _beat_at(beat: Callable[[str], object], where: str, module: nn.Module, inputs: Any) -> None:
    beat(where)
