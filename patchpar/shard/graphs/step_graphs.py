"""Which steps of a denoiser are captured, when they are replayed, and what ends that.

    a kind of step runs first      as always: buffers are allocated, communicators are set up, kernels are chosen
    ... for the second time        captured
    ... afterwards                 replayed: nothing of it runs in Python

A kind is what the process decides before a step: fresh or stale, which guidance call, shapes, and all arguments that
are no tensors. Of exact strategies the first step of an image always runs, since grids of tokens are found in it.
What Python decides in each step would be frozen, so that a network in which it decides anything is not captured. All
ranks of the axis capture and replay the same steps: they have the same calls, and vote on each capture.
"""

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.errors import UnsupportedModel
from patchpar.shard.fingerprint import Fingerprint, fingerprint
from patchpar.shard.graphs.counted_messages import CountedMessages
from patchpar.shard.graphs.network_facts import CapturedFacts, NetworkFacts
from patchpar.shard.graphs.recorder import CapturedStep, CaptureRefused, StepRecorder, without_kept_casts
from patchpar.shard.graphs.repeated_network import (
    KeptTensors,
    baked_in,
    kept_tensors,
    why_not_repeated,
    why_read_elsewhere,
)
from patchpar.shard.graphs.static_call import Call, StaticCall, copies_of_output, signature_of, why_not_static
from patchpar.shard.graphs.time_argument import TimeArgument
from patchpar.shard.verification import every_rank_has

REPLAY = "replay of a step"
MOST_GRAPHS = 8  # of one denoiser: each holds the memory of a step
MOST_MEMORY = 0.1  # of the device, that all may take, unless graphs are required: decoding needs the rest
LEAST_MEMORY = 0.05  # of the device, that they leave, unless graphs are required
MOST_KINDS = 64  # one after the other of which none came twice: the arguments differ from step to step
log = logging.getLogger(__name__)


class CarriedState(Protocol):
    """What crosses steps."""

    @property
    def generation(self) -> int:
        """Which memory this call uses. Another one has another number."""

    def is_kept(self, generation: int) -> bool:
        """Whether there is still the memory of that number."""

    def stored(self) -> Iterable[Tensor]:
        """Yield every tensor, of any shape, that one step leaves to the next."""

    def snapshot(self) -> Any:
        """Return what the process knows of it now, in this guidance call."""

    def set_back(self, snapshot: Any) -> None:
        """Return to what the process knew, as `snapshot` says. Values of tensors stay."""


class Stateless:
    """The state of a strategy that keeps nothing between steps. See `CarriedState`."""

    generation = 0

    def is_kept(self, generation: int) -> bool:
        """Whether this is its only number."""
        return generation == self.generation

    def stored(self) -> Iterable[Tensor]:
        """Yield no tensor of any shape."""
        return ()

    def snapshot(self) -> None:
        """Return nothing."""

    def set_back(self, snapshot: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step. `sent`: its messages; `after`: snapshot of the state at its end; `held`: what it left.

    `kept`: what modules keep beside weights. A graph reads both where they lie, so that they stay. `facts`: what else
    it repeats of the network.
    """

    recording: CapturedStep
    arguments: StaticCall
    facts: CapturedFacts
    kept: tuple[KeptTensors, ...] = ()
    sent: CountedMessages | None = None
    after: Any = None
    held: tuple[Tensor, ...] = ()


_Key = tuple[Hashable, int, Any, Hashable]  # kind, generation of the state, signature of the call, network in it


class StepGraphs:
    """The graphs of one denoiser on one rank of `mesh`.

    `required`: raise UnsupportedModel where a capture is refused, instead of going on without graphs. `level`: of the
    log's line that says so. All ranks keep and drop graphs of the same kinds, since they run the same steps.
    """

    def __init__(
        self,
        network: nn.Module,
        recorder: StepRecorder,
        mesh: AxisComm,
        *,
        required: bool = False,
        level: int = logging.WARNING,
    ) -> None:
        self._network, self._recorder, self._mesh, self._required = network, recorder, mesh, required
        self._level, self._time, self._facts = level, TimeArgument(network), NetworkFacts(network)
        self._graphs: dict[_Key, _Graph] = {}  # the last one used is the last
        self._ran: dict[_Key, tuple[Fingerprint, Any]] = {}  # kinds that have run once, and the network then
        self._not_captured = set[_Key]()
        self._new_kinds = 0  # one after the other
        self._baked: Any = None
        self.replays = 0
        self.refused = ""
        """Why the last kind of step that is not captured is not."""
        self.paused = False
        """Steps run without graphs, such as while every exchange is traced."""

    def run(self, kind: Hashable, step: Callable[..., Any], call: Call, state: CarriedState) -> Any:
        """Return the output of `step` for this call: it runs, is captured, or is replayed. Raises what it raises."""
        if self.paused or self._new_kinds > MOST_KINDS:
            return step(*call[0], **call[1])
        call = self._time.as_tensor(call, self._mesh[0].transport.device)
        key = (kind, state.generation, signature_of(call), self._facts.kind())
        graph = self._graphs.pop(key, None)
        if graph is not None and self._repeats(graph):
            self._graphs[key] = graph
            graph.arguments.take(call)
            return self._replayed(graph, call, state)
        if key in self._not_captured:
            return step(*call[0], **call[1])
        if key in self._ran:
            return self._captured(key, step, call, state)
        self._note(key, state)
        with without_kept_casts(self._mesh[0].transport.device.type):
            return step(*call[0], **call[1])

    def _repeats(self, graph: _Graph) -> bool:
        """Whether a graph computes what the network would: nothing that it reads has been replaced meanwhile."""
        return self._facts.are_as(graph.facts) and all(each.are_there for each in graph.kept)

    def _note(self, key: _Key, state: CarriedState) -> None:
        """Note a kind of step that runs for the first time."""
        self.release(state)
        while len(self._ran) >= MOST_KINDS:
            self._forget(next(iter(self._ran)))
        self._ran[key] = fingerprint(self._network), baked_in(self._network)
        self._new_kinds += 1
        if self._new_kinds > MOST_KINDS:
            self.clear()
            self._new_kinds = MOST_KINDS + 1
            self._refuse(key, f"its arguments differ from step to step: {MOST_KINDS} calls were of as many kinds")

    def release(self, state: CarriedState) -> None:
        """Drop the graphs of memory that is of no more use, before other memory is allocated."""
        for known in [known for known in (*self._graphs, *self._ran) if not state.is_kept(known[1])]:
            self._forget(known)
            self._new_kinds = 0

    def _forget(self, key: _Key) -> None:
        """Drop what is known of a kind of step."""
        self._graphs.pop(key, None)
        self._ran.pop(key, None)
        self._not_captured.discard(key)

    def _captured(self, key: _Key, step: Callable[..., Any], call: Call, state: CarriedState) -> Any:
        """Capture a step that all ranks can capture, and run it."""
        self._new_kinds = 0
        while len(self._graphs) >= MOST_GRAPHS:
            self._forget(next(iter(self._graphs)))
        before, traffic = state.snapshot(), CountedMessages(self._mesh[0].traffic)
        found, reason = self._attempt(key, step, call, state)
        sent, after = traffic.taken_off(), state.snapshot()
        if not every_rank_has(self._mesh, "capture of a step", not reason):
            self._refuse(key, reason or "another rank could not capture this step")
            state.set_back(before)
            return step(*call[0], **call[1])
        assert found is not None
        self._forget(key)
        graph = self._graphs[key] = replace(found, after=after, sent=sent, held=tuple(state.stored()))
        log.info("%s: captured as a graph", self._named(key))
        return self._replayed(graph, call, state)

    def _attempt(
        self, key: _Key, step: Callable[..., Any], call: Call, state: CarriedState
    ) -> tuple[_Graph | None, str]:
        """Return what has been captured, if anything, and why it cannot be used, if so."""
        reason = why_not_static(call, self._mesh[0].transport.device)
        before, weights = self._ran[key][0], baked_in(self._network)
        reason = reason or why_not_repeated(self._network, before, fingerprint(self._network))
        if weights != self._ran[key][1]:
            reason = reason or "its weights, their modes, or factors of adapters change from step to step"
        if reason:
            return None, reason
        arguments, buffers = StaticCall(call), _addresses(state)
        kept = kept_tensors(self._network)
        try:
            recording = self._recorder.capture(lambda: step(*arguments.call[0], **arguments.call[1]), self._named(key))
        except CaptureRefused as error:
            return None, str(error)
        arguments.step_has_been_captured()
        reason = why_read_elsewhere(kept, self._network)
        reason = reason or ("" if self._required else self._why_no_room(recording))
        if baked_in(self._network) != weights:
            reason = "its weights lie elsewhere after each step"
        elif _addresses(state) != buffers:
            reason = "a buffer that one step leaves to the next lies elsewhere each time"
        return _Graph(recording, arguments, self._facts.captured(), tuple(kept.values())), reason

    def _why_no_room(self, recording: CapturedStep) -> str:
        """Return why the memory that a captured step has taken is too much beside other graphs; empty if it is not."""
        taken = recording.fraction + sum(graph.recording.fraction for graph in self._graphs.values())
        if taken > MOST_MEMORY:
            return (
                f"graphs of it take {taken:.0%} of the device's memory, and may take {MOST_MEMORY:.0%}: so large a "
                "step gains little from one launch (graphs=True has no such limit)"
            )
        if recording.untaken < LEAST_MEMORY:
            return (
                f"a graph leaves {recording.untaken:.0%} of the device's memory, and has to leave {LEAST_MEMORY:.0%} "
                "to what comes after the denoiser (graphs=True has no such limit)"
            )
        return ""

    def _replayed(self, graph: _Graph, call: Call, state: CarriedState) -> Any:
        """Replay a step whose arguments have been written. Raises ExchangeError after a failed exchange."""
        comm, _ = self._mesh
        comm.beat(REPLAY)
        comm.transport.check(REPLAY)
        graph.recording.replay()
        graph.arguments.give_back(call)
        state.set_back(graph.after)
        if graph.sent is not None:
            graph.sent.add_to(comm.traffic)
        self.replays += 1
        return copies_of_output(graph.recording.output)

    def _named(self, key: _Key) -> str:
        _, axis = self._mesh
        return f"rank {axis.ranks[axis.rank]}, {type(self._network).__name__}, step of kind {key[0]}"

    def _refuse(self, key: _Key, reason: str) -> None:
        """Capture no step of this kind, and say why. Raises UnsupportedModel if graphs are required."""
        self._not_captured.add(key)
        text = f"{type(self._network).__name__} cannot be captured as a graph: {reason}"
        if self._required:
            raise UnsupportedModel(f"{text}. Use graphs='auto', which goes on without graphs, or graphs=False")
        if reason != self.refused:
            log.log(self._level, "%s: its steps run without graphs", text)
        self.refused = reason

    def look_at_network(self) -> None:
        """Drop all graphs if weights lie elsewhere, or their modes or factors of adapters are others, than before."""
        now, before = baked_in(self._network), self._baked
        self._baked = now
        if self._facts.renew() or (before is not None and now != before):
            self.clear("modules or weights have moved, or their modes or factors of adapters have changed")

    def clear(self, reason: str = "") -> None:
        """Drop all graphs; say so if there are any and there is a `reason`. What is refused may be tried again."""
        if self._graphs and reason:
            log.info("%s: %s, so its steps are captured again", type(self._network).__name__, reason)
        self._graphs.clear()
        self._ran.clear()
        self._not_captured.clear()
        self._new_kinds = 0
        self.refused = ""


def _addresses(state: CarriedState) -> list[int]:
    return sorted({x.untyped_storage()._cdata for x in state.stored()})
