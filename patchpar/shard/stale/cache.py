"""Stale values of one rank's exchange points, and exchanges pending for the next step.

    entry     one exchange point in one guidance call: `guidance_call`
    bucket    small messages of several exchange points, sent as one: `message_bucket`
    cache     all entries; decides whether the previous step may be used in this call

An entry is identified by the denoiser call within the step (guidance may need two), by the exchange point, and by how
often that exchange point has run in the call.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.stale.guidance_call import NEVER, GuidanceCall, StaleEntry
from patchpar.shard.stale.message_bucket import MessageBucket
from patchpar.shard.stale.send_window import NUM_BUFFERS, SendWindow
from patchpar.shard.stale.workspace import Workspace

MOST_CALLS = 16  # in one step: guidance needs two or three
MOST_PARKED = 3  # forms of a guidance call, beside the one that it has


class StaleBytes(NamedTuple):
    """Memory of stale values on one rank. `arriving`: in buffers that values are received into."""

    held: int
    arriving: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.held + self.arriving


class StaleCache:
    """Values stored between the evaluations of one denoiser."""

    def __init__(self, comm: Communicator, bucket: int) -> None:
        self.comm, self.bucket = comm, MessageBucket(comm, bucket)
        self.workspace, self._arriving = Workspace(), [Workspace() for _ in range(NUM_BUFFERS)]
        self.fits = Workspace()  # corrections of all ranks, of use until the attention that reads them
        self._calls: dict[int, GuidanceCall] = {}
        self._call = GuidanceCall(SendWindow(self._arriving))
        self._parked: list[tuple[int, GuidanceCall]] = []  # with their numbers; the one parked last is the last
        self._generations = 0
        self._passed: dict[str, int] = {}
        self.evaluation = 0
        self.attentions = 0  # attention exchange points run in this call
        self.calls_left = 1  # calls of the step from this one on, as far as is known
        self.joins = False  # whether exchanges for the next step end with the call, as those in a graph have to
        self.parks = False  # whether buffers of calls of another form are kept, such as of another size
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
        known = self._of_form(call, form)
        usable = evaluation - known.evaluation == 1
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

    def is_another(self, call: int, form: Any) -> bool:
        """Whether the guidance call of that number last had another form."""
        return call in self._calls and self._calls[call].form not in (None, form)

    def forget_forms(self) -> None:
        """Use no memory of the calls so far again, whatever their form. It is freed when the next calls begin."""
        for known in self._calls.values():
            known.form = None
        for _, known in self._parked:
            known.clear()
        self._parked.clear()

    def _of_form(self, call: int, form: Any) -> GuidanceCall:
        """Return the guidance call of that number and form: the one that was last, one that is parked, or a new one."""
        known = self._calls.pop(call, None)
        if known is not None and known.form != form:
            self._park(call, known)
            known = None
        if known is None:
            known = next((each for number, each in self._parked if number == call and each.form == form), None)
            self._parked = [(number, each) for number, each in self._parked if each is not known]
        if known is None:
            self._generations += 1
            known = GuidanceCall(SendWindow(self._arriving), self._generations)
        self._calls[call] = known
        return known

    def _park(self, call: int, known: GuidanceCall) -> None:
        """Keep a guidance call for others of its form, or forget it."""
        known.settle()
        known.rest()
        of_call = [each for each in self._parked if each[0] == call]
        kept = [*of_call, (call, known)][-MOST_PARKED:] if self.parks and known.form is not None else []
        for _, each in [*of_call, (call, known)]:
            if all(each is not other for _, other in kept):
                each.clear()
        self._parked = [each for each in self._parked if each[0] != call] + kept

    @property
    def generation(self) -> int:
        """Which memory the running call uses: another number for calls of another form."""
        return self._call.generation

    def is_kept(self, generation: int) -> bool:
        """Whether there is still the memory of that number."""
        return any(each.generation == generation for each in (*self._calls.values(), *(x for _, x in self._parked)))

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
            self._call.settle()

    def settle(self) -> None:
        """Wait for every pending exchange. Raises ExchangeError."""
        self.bucket.flush("end of the image")
        for call in self._calls.values():
            call.settle()

    def reset(self) -> None:
        """Prepare for another image: no value of the last one is used again. Buffers are kept."""
        self.settle()
        for call in self._calls.values():
            call.rest()

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
        """Yield every tensor, of any shape, that a call leaves to the next or receives for it; not what is parked."""
        entries = [entry for call in self._calls.values() for entry in call.entries.values()]
        yield from (x for entry in entries for each in (entry.tensors(), entry.arriving()) for x in each)
        yield from (x for memory in self._memories(self._calls.values()) for x in memory.tensors())
        yield from (x for buffer in (self.workspace, self.fits, *self._arriving) for x in buffer.tensors())
        yield self.drift

    def _memories(self, calls: Iterable[GuidanceCall]) -> Iterator[MessageMemory]:
        for call in calls:
            yield from (*call.memories.values(), *(entry.memory for entry in call.entries.values()))

    def num_bytes(self) -> "StaleBytes":
        """Return the bytes stored for the next step, or parked; storage shared by several tensors counts once."""
        calls = [*self._calls.values(), *(call for _, call in self._parked)]
        entries = [entry for call in calls for entry in call.entries.values()]
        held = [x for entry in entries for x in entry.tensors()]
        held += [x for buffer in (self.workspace, self.fits) for x in buffer.tensors()]
        held += [x for memory in self._memories(calls) for x in memory.tensors()]
        arriving = [x for entry in entries for x in entry.arriving()]
        arriving += [x for buffer in self._arriving for x in buffer.tensors()]
        in_arriving = _bytes_by_storage(arriving)
        only_held = {key: size for key, size in _bytes_by_storage(held).items() if key not in in_arriving}
        return StaleBytes(sum(only_held.values()), sum(in_arriving.values()))


def _bytes_by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = [x.untyped_storage() for x in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}
