"""The caller's side of one call: its options, events and callback while it runs, and its output."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

from patchpar.errors import UnsupportedModel
from patchpar.models.adapters import from_safetensors
from patchpar.models.quiet_libraries import import_quietly
from patchpar.pipeline.call_journal import CallJournal
from patchpar.pipeline.caller_random import caller_random_state, sampled_seed
from patchpar.pipeline.component_proxy import network_of, with_part_names
from patchpar.pipeline.messages import (
    CallbackChange,
    CallbackResult,
    CallOptions,
    CallResult,
    CallSeconds,
    MethodResult,
    PreviewEvent,
    Previews,
    RandomState,
    RecordedPrediction,
    RecordingStopped,
    StepEnd,
)
from patchpar.pipeline.startup import PipelineOptions
from patchpar.pipeline.state_changes import change_of, with_whole_paths
from patchpar.pipeline.step_callbacks import CallbackTensors, checked_answer, refuse_for_some_prompts
from patchpar.pipeline.stragglers import StragglerMonitor
from patchpar.plan.plan import Plan
from patchpar.shard.torch_switches import TorchModes
from patchpar.strategies.data.split import merge_outputs

C = TypeVar("C", bound="CallController")
RankEvent = RecordedPrediction | RecordingStopped | CallSeconds
DATA_CALLBACKS = ("PipelineCallback", "MultiPipelineCallbacks")  # diffusers' classes, which have `tensor_inputs`


class CallController:
    """Callback, progress and replies of a call. `owner`: the callback's pipeline. `kind`: where ranks run."""

    def __init__(
        self, owner: Any, kwargs: Mapping[str, Any], *, kind: str, output_module: str, previews: Previews | None = None
    ) -> None:
        self.bound, self.kwargs = kwargs, dict(kwargs)
        self.progress = 0, 0
        self._owner, self._kind, self._output_module, self._previews = owner, kind, output_module, previews
        self._previewed = 0  # the last step with a preview
        self._bar: Any = None
        self._on_step: Callable[[int, int], object] | None = None
        self._bar_options: Mapping[str, Any] | None = None  # None: there is no progress bar, as of jobs
        self._random: RandomState | None = None  # None: that of the thread which makes the call
        self._modes = TorchModes.now(of_process=kind == "local")
        self._callback = self._take_callback()
        self._thread: int | None = None
        self._import: threading.Thread | None = None
        self._facts: dict[str, Any] = {}
        self.changes: list[CallbackChange] = []  # what the callback has done to the pipeline since it was asked last
        self.journal: CallJournal | None = None  # of a job
        self.stragglers = StragglerMonitor()
        self.adapters: tuple[tuple[str, float], ...] | None = None  # None: those that the pipeline has selected
        self.vae: str | None = None  # the way to decode; None for that of the pipeline
        self.answers: list[CallbackResult] = []  # of the callback so far
        self._asked = 0  # times in this attempt
        self._groups = 1  # of prompts, in this attempt
        self._changes: list[tuple[CallbackChange, ...]] = []  # of each answer
        self._num_made = 0  # answers that the ranks have carried out, as a later step of this attempt has shown

    def _take_callback(self) -> Callable[..., Any] | None:
        callback = self.kwargs.get("callback_on_step_end")
        if callback is None or self._kind == "inline":
            return None
        if any(base.__name__ in DATA_CALLBACKS for base in type(callback).__mro__):
            if _is_importable(callback):
                return None  # every rank runs it
            self.kwargs["callback_on_step_end_tensor_inputs"] = callback.tensor_inputs
        del self.kwargs["callback_on_step_end"]
        return callback

    def go_apart(self) -> None:
        """Prepare for a thread of its own: no progress bar, and torch's default generators begin with a seed."""
        self._on_step = lambda step, steps: None
        self.journal = self.journal or CallJournal()
        self._random = self._random or RandomState(seed=sampled_seed(self.kwargs))

    def alone(self, kind: type[C], kwargs: Mapping[str, Any]) -> C:
        """Return a call with other arguments, otherwise like this one, without a callback and previews."""
        found = kind(self._owner, kwargs, kind=self._kind, output_module=self._output_module)
        found._modes = self._modes
        return found

    @property
    def has_enough(self) -> bool:
        """Whether the call need not go on."""
        return False

    @property
    def seed(self) -> int | None:
        """Of the noise of a job without a generator."""
        return None if self._random is None else self._random.seed

    def release(self) -> None:
        """Forget what it would take to go on with the call, which has ended."""
        self.journal, self.answers = None, []

    def resume(self, journal: CallJournal, seed: int | None, answers: Sequence[CallbackResult]) -> None:
        """Go on where another job was: with its journal, its seed, and what its callback has answered."""
        self.journal, self._random = journal, RandomState(seed=seed)
        self.answers, self._changes = list(answers), [answer.changes for answer in answers]

    def options(
        self, plan: Plan, ranks: tuple[int, ...], request: PipelineOptions, *, installation: int, tracing: bool
    ) -> CallOptions:
        """Return the settings of the call beside its arguments, for another attempt to make it."""
        self._asked, self._num_made, self._groups = 0, 0, plan.data
        self.stragglers.reset()
        recorded = () if self.journal is None else self.journal.begin(plan.data)
        if not recorded:  # the callback gets the latents of other calls
            self.answers, self._changes = [], []
        return CallOptions(
            plan=plan,
            ranks=ranks,
            installation=installation,
            verify=request.verify,
            trusted_code=request.trusted_code,
            vae=self.vae or request.vae,
            graphs=request.graphs,
            symmetric_memory=request.symmetric_memory,
            random=self._random or (caller_random_state() if self._kind == "local" else None),
            has_callback=self._callback is not None,
            same_everywhere=self._kind == "torchrun",
            quiet=self._kind == "local" or self._on_step is not None or self._bar_options is None,
            progress_bar=self._bar_options,
            tracing=tracing,
            previews=0 if self._previews is None or self._previews.decoded else self._previews.count,
            decoded_previews=self._previews.count if self._previews is not None and self._previews.decoded else 0,
            records=self.journal is not None,
            recorded=recorded,
            adapters=self.adapters,
            modes=self._modes,
        )

    @contextmanager
    def reporting(
        self, on_step: Callable[[int, int], object] | None, progress: Mapping[str, Any]
    ) -> Iterator["CallController"]:
        """Report steps to `on_step`, or show diffusers' progress bar with the options `progress`."""
        self._on_step, self._bar_options = self._on_step or on_step, progress
        try:
            yield self
        finally:
            if self._bar is not None:
                self._bar.close()
            if self._import is not None:
                self._import.join()  # a program that ends during the import would crash or get another exit code

    def on_event(self, rank: int, event: tuple[str, int, int] | RankEvent | PreviewEvent) -> None:
        """Report a finished step, or its preview, or keep what a rank has sent of a denoiser call."""
        if isinstance(event, PreviewEvent):
            assert self._previews is not None, "ranks send them if they are wanted"
            if event.step > self._previewed:  # else of a call that is made again
                self._previewed = event.step
                self._previews.receive(event.step, event.steps, event.preview)
        elif isinstance(event, tuple):
            self._report(*event[1:])
        else:
            self._keep(rank, event)

    def made_changes(self, *, ended: bool) -> Sequence[CallbackChange]:
        """Return the changes of the callback that the ranks have made in this attempt.

        `ended`: they have ended it together, so that they have made all that they were told.
        """
        return [*chain.from_iterable(self._changes[: self._asked if ended else self._num_made])]

    def _report(self, step: int, total: int) -> None:
        self._num_made = self._asked
        if (step, total) <= self.progress:
            return  # of a call that is made again
        self.progress = step, total
        if self._on_step is not None:
            self._on_step(step, total)
        elif self._kind == "local":
            self._show(total)
        if step == 1 and self._kind == "local":
            self._prepare_for_output()

    def _keep(self, rank: int, event: RankEvent) -> None:
        if isinstance(event, CallSeconds):
            self.stragglers.add(rank, event.own)
            return
        assert self.journal is not None
        self.journal.add(event)
        if isinstance(event, RecordingStopped) and event.loses:  # another attempt asks the callback from the first step
            self.answers = []

    def _show(self, total: int) -> None:
        if self._bar is None:
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(**{"total": total, **(self._bar_options or {})})
        self._bar.update(1)

    def _prepare_for_output(self) -> None:
        """Import the module of the output's class while the ranks work, not after the output has arrived."""
        self._import = threading.Thread(target=import_quietly, args=(self._output_module,), daemon=True)
        self._import.start()

    def on_ask(self, question: Any) -> Any:
        """Return the callback's result for a StepEnd; any other question of rank 0 is the reply for all ranks."""
        return self._call_back(question) if isinstance(question, StepEnd) else question

    def _call_back(self, end: StepEnd) -> CallbackResult:
        assert self._callback is not None
        self._asked += 1
        if self._asked <= len(self.answers):
            return self.answers[self._asked - 1]
        given = CallbackTensors(end.tensors)
        self._facts, self.changes = dict(end.facts), []
        self._thread = threading.get_ident()
        try:
            answer = checked_answer(self._callback(self._owner, end.step, end.timestep, end.tensors))
        finally:
            self._thread = None
        tensors = given.changed(answer)
        refuse_for_some_prompts(tensors, self._groups)
        result = CallbackResult(tensors=tensors, changes=tuple(self.changes))
        self._changes.append(result.changes)
        if self.journal is not None:
            self.answers.append(result)
        return result

    @property
    def in_callback(self) -> bool:
        """Whether the caller's callback is running in this thread."""
        return self._thread == threading.get_ident()

    def attribute(self, name: str) -> Any:
        """Return an attribute of the pipeline for the callback. Raises AttributeError if only the ranks have it."""
        for found in (name, f"_{name}"):
            if found in self._facts:
                return self._facts[found]
        raise AttributeError(
            f"pipe.{name} cannot be read inside callback_on_step_end, because the ranks are busy; available are: "
            f"{', '.join(sorted(fact for fact in self._facts if not fact.startswith('_')))}"
        )

    def set_attribute(self, name: str, value: Any) -> None:
        """Record that the callback sets an attribute; all ranks do so after it has returned."""
        self._facts[name] = value
        if name.startswith("_"):
            self._facts.pop(name[1:], None)  # of the property that reads it
        self.changes.append(CallbackChange(name, (value,)))

    def apply(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MethodResult:
        """Record that the callback calls a method of the pipeline or a network; all ranks do so after it has returned.

        Raises UnsupportedModel for a method that changes nothing, whose result is not available, and PlanError for one
        that would load a pickle.
        """
        if change_of(path, args, kwargs) is None:
            raise UnsupportedModel(
                f"pipe.{path}() cannot be called inside callback_on_step_end, because the ranks are busy: only methods "
                "that change the pipeline can (set_..., enable_..., disable_...); all ranks run them after the callback"
            )
        owners = self, getattr(self._owner, "_state", None)
        args, kwargs = with_part_names(args, kwargs, lambda value: network_of(value, *owners))
        whole, named = with_whole_paths(path, args, from_safetensors(path, args, kwargs))
        self.changes.append(CallbackChange(path, whole, named))
        return MethodResult(None)

    def ask(self, method: str, path: str, *values: Any, **_: Any) -> None:
        """Record that the callback sets an attribute of a network. Raises AttributeError if it reads one."""
        if method != "set":
            raise AttributeError(
                f"pipe.{path} cannot be read inside callback_on_step_end, because the ranks are busy; it can be set"
            )
        self.changes.append(CallbackChange(path, values))


def _is_importable(callback: Any) -> bool:
    parts = getattr(callback, "callbacks", None) or [callback]
    return all(type(part).__module__ != "__main__" and "<locals>" not in type(part).__qualname__ for part in parts)


def output_of(results: Sequence[CallResult]) -> Any:
    """Return one output, merged from those of the ranks that have one."""
    outputs = [result.output for result in results if result.output is not None]
    return merge_outputs(outputs) if len(outputs) > 1 else next(iter(outputs), None)
