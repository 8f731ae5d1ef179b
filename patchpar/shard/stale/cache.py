"""What the seams of one rank remember of the last step, and what is on its way for the next. Buckets of small messages.

    slot      one seam in one guidance call: what others sent last, our own last value, what is coming
    bucket    small messages of several seams that leave as one
    memory    all slots; says whether the last step may be used in this call

Slots are told apart by the denoiser call within the step (guidance may need two), by the seam, and by how often this
seam has been passed in the call.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator, ExchangePart, Received
from patchpar.comm.transport import Work
from patchpar.errors import ExchangeError, UnsupportedModel

MOST_CALLS = 16  # in one step: guidance needs two or three


@dataclass(slots=True)
class StaleEntry:
    """One seam in one guidance call. `received` and `own` are of the last evaluation; `state` is the seam's own."""

    received: Received = field(default_factory=dict)
    own: Tensor | None = None
    state: Any = None
    pending: Callable[[], Received] | None = None

    def wait(self) -> Received:
        """What others sent in the last step. Waits for it if need be. Raises ExchangeError."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.received = pending()
        return self.received

    def take(self) -> Received:
        """As `wait`, and keep nothing of it here: the seam's state has it."""
        received, self.received = self.wait(), {}
        return received

    def drop(self) -> None:
        """Take in what is under way, and forget it."""
        self.take()

    def keep(self, received: Received, own: Tensor | None = None) -> None:
        """Remember values of this step, which was exchanged at once."""
        self.drop()
        self.received, self.own = received, own

    def tensors(self) -> Iterator[Tensor]:
        """Everything held."""
        yield from (x for tensors in self.received.values() for x in tensors)
        if self.own is not None:
            yield self.own
        if self.state is not None:
            yield from self.state.tensors()


class MessageBucket:
    """Collects small messages and sends `size` of them as one. All ranks fill theirs in the same order."""

    def __init__(self, comm: Communicator, size: int) -> None:
        self._comm, self._size = comm, size
        self._parts: list[ExchangePart] = []
        self._tickets: list[_Ticket] = []

    def put(self, part: ExchangePart, where: str) -> Callable[[], Received]:
        """Add a part; what comes back waits for what has come in. Its tensors must not change afterwards."""
        ticket = _Ticket(len(self._parts), where)
        self._parts.append(part)
        self._tickets.append(ticket)
        if len(self._parts) >= self._size:
            self.flush(where)
        return ticket.wait

    def flush(self, where: str) -> None:
        """Send what has been collected."""
        if not self._parts:
            return
        exchange = self._comm.exchange(where, self._parts, label="bucket")
        for ticket in self._tickets:
            ticket.exchange = exchange
        self._parts, self._tickets = [], []


class _Ticket:
    def __init__(self, index: int, where: str) -> None:
        self.index, self.where, self.exchange = index, where, None

    exchange: Work[list[Received]] | None

    def wait(self) -> Received:
        assert self.exchange is not None, "a bucket is flushed before the call that filled it ends"
        try:
            return self.exchange.wait()[self.index]
        except ExchangeError as error:  # it names the seam that filled the bucket up
            raise ExchangeError(f"{self.where} waits for values of the last step: {error}") from error


@dataclass(slots=True)
class _GuidanceCall:
    """One guidance call of the step: its slots, and the evaluation and form they are of."""

    entries: dict[tuple[str, int], StaleEntry] = field(default_factory=dict)
    evaluation: int = -2
    form: Any = None


class StaleCache:
    """What is remembered between the evaluations of one denoiser."""

    def __init__(self, comm: Communicator, bucket: int) -> None:
        self.comm, self.bucket = comm, MessageBucket(comm, bucket)
        self._calls: dict[int, _GuidanceCall] = {}
        self._call = _GuidanceCall()
        self._passed: Counter[str] = Counter()
        self.evaluation = 0
        self.continues = False  # whether the last evaluation of this call is known
        self.attentions = 0  # attention seams passed in this call
        self.drift = torch.zeros(2)  # squared change of our keys in this call, and their square

    def begin(self, call: int, evaluation: int, form: Any) -> bool:
        """Start a denoiser call; whether the last evaluation of the same call is known, and had the same `form`.

        Raises UnsupportedModel where calls pile up because the scheduler's steps cannot be seen.
        """
        if call >= MOST_CALLS:
            raise UnsupportedModel(
                f"the denoiser has been called {call + 1} times without a scheduler step in between, so that it cannot "
                "be told what the last step's values are: use strategy 'exact'"
            )
        known = self._calls.setdefault(call, _GuidanceCall())
        usable = known.form == form and evaluation - known.evaluation == 1
        if known.form != form:
            _settle(known)
            known.entries.clear()
        known.form, known.evaluation = form, evaluation
        self._call, self.evaluation, self.attentions = known, evaluation, 0
        self.continues = usable
        self.drift = torch.zeros(2, device=self.comm.transport.device)
        self._passed.clear()
        return usable

    def entry(self, where: str) -> StaleEntry:
        """The slot of a seam that is being passed now."""
        key = (where, self._passed[where])
        self._passed[where] += 1
        return self._call.entries.setdefault(key, StaleEntry())

    def send(self, part: ExchangePart, where: str) -> Callable[[], Received]:
        """Send for the next step, in a bucket with others. The part's tensors must not change afterwards."""
        return self.bucket.put(part, where)

    def send_at_once(self, part: ExchangePart, where: str) -> Callable[[], Received]:
        """Send for the next step."""
        exchange = self.comm.exchange(where, [part])
        return lambda: exchange.wait()[0]

    def end(self) -> None:
        """End a denoiser call: nothing waits in the bucket."""
        self.bucket.flush("end of the call")

    def settle(self) -> None:
        """Take in everything that is under way. Raises ExchangeError."""
        self.bucket.flush("end of the picture")
        for call in self._calls.values():
            _settle(call)

    def reset(self) -> None:
        """Before another picture: nothing of the last one may be used. Buffers are kept."""
        self.settle()
        for call in self._calls.values():
            call.evaluation = -2
            for entry in call.entries.values():
                entry.own = None  # or the first step would seem to have drifted from the last picture

    def num_bytes(self) -> int:
        """Bytes held for the next step: each piece of memory once, however many tensors lie in it."""
        tensors = (x for call in self._calls.values() for entry in call.entries.values() for x in entry.tensors())
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def _settle(call: _GuidanceCall) -> None:
    for entry in call.entries.values():
        entry.wait()
