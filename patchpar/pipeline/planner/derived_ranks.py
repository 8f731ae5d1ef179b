"""The program of a rank under a plan that differs from a recorded one only in exact attention between ranks.

Of each form of attention in the recorded call it is recorded how the other plan exchanges, alone; then the events of
the recorded call are noted again, with these in the place of its own. Where what a call did may depend on the way of
exchange in another way, nothing is derived, and the plan is recorded as any other.
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from patchpar.comm.kernels.fused_op import fused_without_values
from patchpar.errors import PlanError
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import MetaMode
from patchpar.models.info import PipelineInfo
from patchpar.pipeline.planner.call_log import (
    AttentionForm,
    CallLog,
    LoggedAttention,
    LoggedBytes,
    LoggedTape,
    MetaForm,
    Noted,
)
from patchpar.pipeline.planner.event_runs import EventRun, in_runs
from patchpar.pipeline.planner.image_ranks import ImageRanks, SourcesOfRank
from patchpar.pipeline.planner.moved_events import NotAlikeError, are_of_one_branch, moved_events
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.recording_transport import RecordingCommunicator, RecordingTransport
from patchpar.pipeline.planner.repeated_encoders import KnownEncoders
from patchpar.pipeline.planner.tape_recorder import ENCODE, Begun, Expected, TapeRecorder
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.plan import Plan
from patchpar.shard.attention.dispatch import on_link_of
from patchpar.strategies.exact import ExactPatch

HERE = "\0here"
"""Stands for the exchange point of attention that is recorded alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRank:
    """A rank as it was recorded, the `model` and the events of its call, and the bytes that were alive before."""

    rank: RecordedRank
    model: PipelineInfo
    alive: int
    events: tuple[EventRun | Noted | LoggedAttention, ...]


class AttentionAlone(NamedTuple):
    """Attention that was recorded alone: what it has noted, and its result, see LoggedAttention."""

    events: tuple[EventRun | Noted | LoggedAttention, ...]
    result: tuple[MetaForm, int, int] | None


@dataclass(slots=True)
class LoggedRanks:
    """Ranks that were recorded, of one model and call: by plan without its way of exchange, rank and steps.

    And exact attention that was recorded alone, for others; None where it cannot be. `block_forms`: see
    `RepeatedBlocks`. `encoders`: see `RepeatedEncoders`.
    """

    block_forms: dict[nn.Module, tuple[Any, ...]] = field(default_factory=dict)
    encoders: KnownEncoders = field(default_factory=dict)

    _ranks: dict[tuple[Plan, int, int], LoggedRank] = field(default_factory=dict)
    _sources: dict[tuple[Plan, int], tuple[SourcesOfRank, ...]] = field(default_factory=dict)
    _attentions: dict[tuple[AttentionMode, int, AttentionForm], AttentionAlone | None] = field(default_factory=dict)

    def keep(self, plan: Plan, steps: int, log: CallLog, rank: RecordedRank, model: PipelineInfo) -> None:
        """Keep a rank, if others may be derived from it."""
        if is_exact(plan) and log.is_whole and not rank.stale_bytes:
            found = LoggedRank(rank=rank, model=model, alive=log.alive, events=tuple(in_runs(log.events)))
            self._ranks[_gathering(plan), rank.rank, steps] = found

    def keep_sources(self, ranks: ImageRanks, steps: int, *, branches_are_alike: bool) -> None:
        """Keep which ranks of a plan others are like, after it was checked that their messages match."""
        if is_exact(ranks.plan):
            plan = _gathering(ranks.plan)
            known = [
                source if branches_are_alike or are_of_one_branch(plan, rank, source) else SourcesOfRank(rank, rank)
                for rank, source in enumerate(ranks.sources)
            ]
            self._sources.setdefault((plan, steps), tuple(known))

    def find(self, plan: Plan, rank: int, steps: int) -> LoggedRank | None:
        """Return a rank from which that of a plan may be derived; None without one."""
        if not is_exact(plan):
            return None
        plan = _gathering(plan)
        if (plan, rank, steps) not in self._ranks and (plan, steps) in self._sources:
            self._move(plan, rank, steps)
        return self._ranks.get((plan, rank, steps))

    def _move(self, plan: Plan, rank: int, steps: int) -> None:
        """Keep a rank that was not recorded as it follows from those that it is like, if it does."""
        sources = self._sources[plan, steps]
        source = sources[rank] if rank < len(sources) else SourcesOfRank(rank, rank)
        found = {each: self._ranks.get((plan, each, steps)) for each in (source.steps, source.decode)}
        logged = {each: rank for each, rank in found.items() if rank is not None}
        if len(logged) < len(found):
            return
        with suppress(NotAlikeError):
            events = moved_events(plan, rank, source, {each: found.events for each, found in logged.items()})
            like = logged[source.steps]
            self._ranks[plan, rank, steps] = replace(like, rank=replace(like.rank, rank=rank), events=events)

    def derived(self, plan: Plan, logged: LoggedRank, options: RecordOptions) -> RecordedRank | None:
        """Return the rank of a plan for which `find` has this one; None where it has to be recorded itself."""
        rank, again = logged.rank.rank, _NotedAgain(options, logged.alive)
        keys = on_link_of(again.transport(rank), plan.strategy.policy.keys)
        for event in logged.events:
            if not isinstance(event, LoggedAttention):
                again.note(event, "")
                continue
            found = None if event.form is None else self._attention(keys, rank, event.form, options)
            if found is None or event.result is None or found.result != event.result:
                return None
            for each in found.events:
                again.note(each, event.where)
        tape, memory = again.tape.tape, again.memory
        return replace(logged.rank, tape=tape, peaks=dict(memory.peaks), working=dict(memory.working))

    def _attention(
        self, keys: AttentionMode, rank: int, form: AttentionForm, options: RecordOptions
    ) -> AttentionAlone | None:
        key = keys, rank, form
        if key not in self._attentions:
            try:
                found = attention_alone(keys, rank, form, options)
                self._attentions[key] = AttentionAlone(tuple(in_runs(found.events)), found.result)
            except (PlanError, NotImplementedError, RuntimeError):  # a recording of the plan will say why
                self._attentions[key] = None
        return self._attentions[key]


def is_exact(plan: Plan) -> bool:
    """Whether ranks of a plan exchange keys and values, fresh ones only, and hold all weights."""
    whole = plan.weights == "whole" and plan.stage * plan.tensor == 1
    return whole and plan.patch > 1 and isinstance(plan.strategy, ExactPatch)


def _gathering(plan: Plan) -> Plan:
    return replace(plan, strategy="exact")


def attention_alone(keys: AttentionMode, rank: int, form: AttentionForm, options: RecordOptions) -> LoggedAttention:
    """Record exact attention of a form alone, at the exchange point HERE. Raises what `attend_together` raises."""
    log = CallLog()
    tape, memory = LoggedTape(log, joined=options.joined), LoggedBytes(log, ENCODE)
    mode = MetaMode(memory, tape.operator, options.known)
    comm = RecordingCommunicator(RecordingTransport(rank, tape, joined=options.joined))
    with ExitStack() as stack:
        if options.joined:
            stack.enter_context(fused_without_values())
        shared = form.shared()
        for each in (torch.no_grad(), mode.functions(joined=options.joined), mode):
            stack.enter_context(each)
        log.begin(0)
        log.attend(memory, keys, comm, form.axis, HERE, shared)
    found = log.events[0]  # then its result is freed
    assert isinstance(found, LoggedAttention)
    return found if log.is_whole else replace(found, result=None)


class _NotedAgain:
    """A tape and memory on which events are noted again. Numbers of messages and operations follow from their order."""

    def __init__(self, options: RecordOptions, alive: int) -> None:
        self._joined = options.joined
        self.tape, self.memory = TapeRecorder(joined=options.joined), LiveBytes(ENCODE)
        self.memory.peaks.clear()
        self.memory.working.clear()
        self.memory.alive = alive
        self._known: dict[Any, Any] = {}  # messages and operations by those of the log

    def transport(self, rank: int) -> RecordingTransport:
        """Return the transport of a rank, which notes on this tape."""
        return RecordingTransport(rank, self.tape, joined=self._joined)

    def note(self, event: EventRun | Noted | LoggedAttention, where: str) -> None:
        """Note an event; of attention that was recorded alone, at the exchange point `where`."""
        if isinstance(event, EventRun):
            self.tape.operators(event.operators)
            self.memory.change_all(event.num_bytes, event.most)
        else:
            assert isinstance(event, Noted)
            self._call(event, where)

    def _call(self, event: Noted, where: str) -> None:
        target = self.tape if event.of is TapeRecorder else self.memory
        args = [self._argument(each, where) for each in event.args]
        found = getattr(target, event.name)(*args, **event.options)
        if event.result is not None:
            self._known[event.result] = found

    def _argument(self, value: Any, where: str) -> Any:
        if isinstance(value, (Expected, Begun)):
            return self._known[value]
        return value.replace(HERE, where) if isinstance(value, str) else value
