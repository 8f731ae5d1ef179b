"""Stale values of one rank's exchange points, and exchanges pending for the next step.

    entry     one exchange point in one guidance call: values last received, the rank's own last value, pending exchange
    bucket    small messages of several exchange points, sent as one: `message_bucket`
    cache     all entries; decides whether the previous step may be used in this call

An entry is identified by the denoiser call within the step (guidance may need two), by the exchange point, and by how
often that exchange point has run in the call.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.stale.message_bucket import BucketMemories, MessageBucket
from patchpar.shard.stale.send_window import NUM_BUFFERS, SendWindow
from patchpar.shard.stale.workspace import Workspace

MOST_CALLS = 16  # in one step: guidance needs two or three
NEVER = -2  # as the number of the last evaluation: none in this image. -1 would be the one before evaluation 0


class StaleBytes(NamedTuple):
    """Memory of stale values on one rank. `arriving`: in buffers that values are received into."""

    held: int
    arriving: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.held + self.arriving


@dataclass(slots=True)
class StaleEntry:
    """One exchange point in one guidance call. `received` and `own` are of the previous evaluation.

    `state` belongs to the exchange point. `memory`: of its messages for the next step, unless these are in a bucket.
    `evaluation`: in which it ran last. Of its latest run, `is_first`: whether none was before in this image, or since a
    step was missed; `continues`: whether one was in the evaluation before.
    """

    received: Received = field(default_factory=dict)
    own: Tensor | None = None
    state: Any = None
    pending: Callable[[], Received] | None = None
    memory: MessageMemory = field(default_factory=MessageMemory)
    evaluation: int = NEVER
    is_first: bool = True
    continues: bool = False

    def wait(self) -> Received:
        """Wait for the pending exchange, if any, and return the stale values received. Raises ExchangeError."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.received = pending()
        return self.received

    def pop(self) -> Received:
        """As `wait`, and store nothing here: the state of the exchange point has the values."""
        received, self.received = self.wait(), {}
        return received

    def drop(self) -> None:
        """Wait for the pending exchange and discard its values."""
        if self.pending is not None or self.received:  # neither, nearly always
            self.pop()

    def put(self, received: Received, own: Tensor | None = None) -> None:
        """Store fresh values for the next step.

        `received`: tensors of any shape by global rank; `own`: this rank's value, of any shape.
        """
        self.drop()
        self.received, self.own = received, own

    def tensors(self) -> Iterator[Tensor]:
        """Yield every stored tensor, of any shape."""
        yield from (x for tensors in self.received.values() for x in tensors)
        if self.own is not None:
            yield self.own
        if self.state is not None:
            yield from self.state.tensors()

    def arriving(self) -> Iterator[Tensor]:
        """Yield the buffers, of any shape, that hold nothing but what the exchange in flight will bring."""
        if self.state is not None:
            yield from self.state.arriving()


@dataclass(slots=True)
class _GuidanceCall:
    """One guidance call of the step: its entries, and the evaluation and form they belong to.

    `memories` of its buckets.
    """

    window: SendWindow
    entries: dict[tuple[str, int], StaleEntry] = field(default_factory=dict)
    memories: BucketMemories = field(default_factory=dict)
    evaluation: int = NEVER
    form: Any = None

    def clear(self) -> None:
        """Forget all exchange points. None may be in flight."""
        self.entries.clear()
        self.memories.clear()
        self.window.clear()


class StaleCache:
    """Values stored between the evaluations of one denoiser."""

    def __init__(self, comm: Communicator, bucket: int) -> None:
        self.comm, self.bucket = comm, MessageBucket(comm, bucket)
        self.workspace, self._arriving = Workspace(), [Workspace() for _ in range(NUM_BUFFERS)]
        self._calls: dict[int, _GuidanceCall] = {}
        self._call = _GuidanceCall(SendWindow(self._arriving))
        self._passed: dict[str, int] = {}
        self.evaluation = 0
        self.attentions = 0  # attention exchange points run in this call
        self.joins = False  # whether exchanges for the next step end with the call, as those in a graph have to
        self.generation = 0  # how often exchange points have been forgotten
        self.measures_drift = False
        self.drift = torch.zeros(2, device=comm.transport.device)
        """Squared change of this rank's keys in this call, and their square."""

    def begin(self, call: int, evaluation: int, form: Any) -> bool:
        """Start a denoiser call; return whether the previous evaluation of the same call is known with the same `form`.

        Raises UnsupportedModel where calls pile up because the scheduler's steps cannot be observed.
        """
        if call >= MOST_CALLS:
            raise UnsupportedModel(
                f"the denoiser has been called {call + 1} times without a scheduler step in between (limit "
                f"{MOST_CALLS}), so stale values cannot be assigned to a step: use strategy 'exact'"
            )
        known = self._calls.setdefault(call, _GuidanceCall(SendWindow(self._arriving)))
        usable = known.form == form and evaluation - known.evaluation == 1
        if known.form != form:
            _settle(known)
            known.clear()
            self.generation += 1
        if not usable:
            for entry in known.entries.values():
                entry.evaluation = NEVER
        known.window.begin()
        known.form, known.evaluation = form, evaluation
        self._call, self.evaluation, self.attentions = known, evaluation, 0
        self.bucket.memories = known.memories
        if self.measures_drift:
            self.drift.zero_()
        self._passed.clear()
        return usable

    def rewind(self) -> None:
        """Begin another pass over the exchange points of this call, as for the next piece of an image."""
        self._passed.clear()

    def entry(self, where: str) -> StaleEntry:
        """Return the entry of the exchange point that runs now."""
        passed = self._passed.get(where, 0)
        self._passed[where] = passed + 1
        entries, key = self._call.entries, (where, passed)
        found = entries.get(key)
        if found is None:
            found = entries[key] = StaleEntry()
        if found.evaluation != self.evaluation:  # a piece of the image may have passed it in this one
            found.is_first, found.continues = found.evaluation == NEVER, self.evaluation - found.evaluation == 1
            found.evaluation = self.evaluation
        return found

    def is_first_state(self) -> bool:
        """Whether no exchange point of this call has a state yet."""
        return all(entry.state is None for entry in self._call.entries.values())

    def send(self, part: ExchangePart, where: str, entry: StaleEntry) -> Callable[[], Received]:
        """Send for the next step, in a bucket with others; see `MessageBucket.put`."""
        return self.bucket.put(part, where, entry)

    def send_at_once(
        self, part: ExchangePart, where: str, memory: MessageMemory | None = None
    ) -> Callable[[], Received]:
        """Send for the next step. `memory`: of the exchange point's messages, whose last values have been read."""
        exchange = self.comm.exchange(where, [part], bulk=True, memory=memory)
        return lambda: exchange.wait()[0]

    def gather_at_once(self, axis: Axis, where: str, rows: Tensor) -> Callable[[], Received]:
        """Send this rank's part of `rows` [P l, ...] to all ranks of the axis, and receive theirs for the next step.

        They must not change until the function returned has waited.
        """
        exchange = self.comm.all_gather(axis, "kv", where, rows.chunk(axis.size)[axis.rank], into=rows, bulk=True)

        def wait() -> Received:
            exchange.wait()
            return {}

        return wait

    @property
    def window(self) -> SendWindow:
        """The exchange points of this call that send late."""
        return self._call.window

    def end(self) -> None:
        """End a denoiser call: send what is left in the bucket, and wait for what was to be read in this call."""
        self.bucket.flush("end of the call")
        self._call.window.end()
        if self.joins:
            _settle(self._call)

    def settle(self) -> None:
        """Wait for every pending exchange. Raises ExchangeError."""
        self.bucket.flush("end of the image")
        for call in self._calls.values():
            _settle(call)

    def reset(self) -> None:
        """Prepare for another image: no value of the last one is used again. Buffers are kept."""
        self.settle()
        for call in self._calls.values():
            call.evaluation = NEVER
            for entry in call.entries.values():
                entry.own = None  # or drift of the first step would be measured against the last image

    def snapshot(self) -> list[Any]:
        """Return what the process knows of the exchange points of this call: values are not copied."""
        return [(entry, entry.received, entry.own, entry.pending) for entry in self._call.entries.values()]

    def set_back(self, snapshot: list[Any]) -> None:
        """Return to what the process knew of this call's exchange points before any of them has run.

        Nothing is sent, and no value is changed.
        """
        self.bucket.empty()
        self._call.window.begin()
        self._passed.clear()
        self.attentions = 0
        for entry, received, own, pending in snapshot:
            entry.received, entry.own, entry.pending = received, own, pending
            entry.evaluation = self.evaluation

    def stored(self) -> Iterator[Tensor]:
        """Yield every tensor, of any shape, that a call leaves to the next or receives for it."""
        entries = [entry for call in self._calls.values() for entry in call.entries.values()]
        yield from (x for entry in entries for each in (entry.tensors(), entry.arriving()) for x in each)
        yield from (x for memory in self._memories() for x in memory.tensors())
        yield from (x for buffer in (self.workspace, *self._arriving) for x in buffer.tensors())
        yield self.drift

    def _memories(self) -> Iterator[MessageMemory]:
        for call in self._calls.values():
            yield from (*call.memories.values(), *(entry.memory for entry in call.entries.values()))

    def num_bytes(self) -> "StaleBytes":
        """Return the bytes stored for the next step; storage shared by several tensors counts once."""
        entries = [entry for call in self._calls.values() for entry in call.entries.values()]
        held = [*(x for entry in entries for x in entry.tensors()), *self.workspace.tensors()]
        held += [x for memory in self._memories() for x in memory.tensors()]
        arriving = [x for entry in entries for x in entry.arriving()]
        arriving += [x for buffer in self._arriving for x in buffer.tensors()]
        in_arriving = _bytes_by_storage(arriving)
        only_held = {key: size for key, size in _bytes_by_storage(held).items() if key not in in_arriving}
        return StaleBytes(sum(only_held.values()), sum(in_arriving.values()))


def _bytes_by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = [x.untyped_storage() for x in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _settle(call: _GuidanceCall) -> None:
    for entry in call.entries.values():
        entry.wait()
