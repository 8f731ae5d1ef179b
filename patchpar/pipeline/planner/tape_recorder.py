"""Collects the tape of one rank while its program runs: operators, messages, waits, and where blocks and steps begin.

Messages between two ranks arrive in the order they were sent, so that their number is counted for each pair of ranks,
from DECODE_NUMBERS on for what is sent after a step has ended. So are the operations of a rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from patchpar.plan.replay.tape import AGAIN, COPIED, Boundary, Leave, Operator, Receive, Send, Tape, TapeEntry, Wait

ENCODE, DECODE = "encode", "decode"
DECODE_NUMBERS = 10**9


class Expected(NamedTuple):
    """A message that was announced and not waited for yet, in call number `call`."""

    call: int
    number: int
    sender: int
    num_bytes: int
    where: str
    kind: str


class Begun(NamedTuple):
    """An operation of call number `call` in which this rank sends; 0: it sends nothing in it."""

    call: int
    operation: int


class TapeRecorder:
    """The entries of the call since `begin`, and its `steps`.

    A step begins with its first call of a denoiser, or of a network that conditions it, such as a ControlNet.

    `joined`: messages are those of operations of several ranks, as NCCL has them.
    """

    def __init__(self, *, joined: bool = False) -> None:
        self._call, self._joined = 0, joined
        self.begin()

    def begin(self) -> None:
        """Begin a call; forget the one before."""
        self._call += 1
        self._entries: list[TapeEntry] = [Boundary(ENCODE, is_step=True)]
        self._sent: Counter[tuple[int, int]] = Counter()
        self._announced: Counter[tuple[int, int]] = Counter()
        self._operations: Counter[int] = Counter()
        self._operation = 0
        self.steps, self._next, self._is_called = 0, True, False

    def operator(self, found: Operator) -> None:
        """Note an operator."""
        self._entries.append(found)

    def operators(self, found: Sequence[Operator]) -> None:
        """Note several operators."""
        self._entries.extend(found)

    def send(self, peer: int, by_kind: Mapping[str, int], label: str, where: str, *, bulk: bool = False) -> None:
        """Note a message to one rank; `by_kind`: its bytes."""
        number = self._counted(self._sent, peer)
        if self._joined and not self._operation:
            self._operations[self._first] += 1
            self._operation = self._first + self._operations[self._first]
        parts = tuple(by_kind.items()) if len(by_kind) > 1 else ()
        kind = label if parts or not by_kind else next(iter(by_kind))
        self._entries.append(Send(number, (peer,), kind, sum(by_kind.values()), where, parts, bulk, self._operation))

    def copy(self, rank: int, num_bytes: int, where: str) -> Expected:
        """Note that this rank begins to copy from the host's memory, as a message to itself; return it for `wait`."""
        number = self._counted(self._sent, rank)
        self._entries.append(Send(number, (rank,), COPIED, num_bytes, where, bulk=True))
        return Expected(self._call, number, rank, num_bytes, where, COPIED)

    def begun(self) -> Begun:
        """Return the operation of what was sent since the last time."""
        found, self._operation = Begun(self._call, self._operation), 0
        return found

    def expect(self, sender: int, num_bytes: int, kind: str, where: str) -> Expected:
        """Return the next message of a rank, for `wait`."""
        number = self._counted(self._announced, sender)
        if self._joined:
            self._entries.append(Receive(number, sender, where))
        return Expected(self._call, number, sender, num_bytes, where, kind)

    def _counted(self, counter: Counter[tuple[int, int]], peer: int) -> int:
        counter[peer, self._first] += 1
        return self._first + counter[peer, self._first] - 1

    @property
    def _first(self) -> int:
        return DECODE_NUMBERS if self.steps and self._next else 0

    def wait(self, message: Expected) -> None:
        """Note that the rank needs a message now. One of a call before is none of this call."""
        if message.call == self._call:
            self._entries.append(Wait(message.number, message.sender, message.num_bytes, message.where, message.kind))

    def leave(self, begun: Begun, kind: str, where: str) -> None:
        """Note that what the rank has sent in an operation has to be there now."""
        if begun.operation and begun.call == self._call:
            self._entries.append(Leave(begun.operation, where, kind))

    def block(self, path: str) -> None:
        """Note that a block begins."""
        self._entries.append(Boundary(path))

    def denoiser(self) -> None:
        """Note that a denoiser is called."""
        if self._is_called:
            self._entries.append(Boundary(AGAIN))
        self._is_called = True
        self._begin_step()

    def conditioner(self) -> None:
        """Note that a network is called that conditions a denoiser."""
        self._begin_step()

    def _begin_step(self) -> None:
        if self._next:
            self._entries.append(Boundary(f"step {self.steps}", is_step=True))
        self._next = False

    def step_ended(self) -> None:
        """Note that the scheduler has made a step. What follows is decoding unless another step begins."""
        self._entries.append(Boundary(DECODE, is_step=True))
        self.steps, self._next, self._is_called = self.steps + 1, True, False

    @property
    def tape(self) -> Tape:
        """All entries. What lies between two steps, such as a callback, belongs to the first of them."""
        steps = [at for at, entry in enumerate(self._entries) if isinstance(entry, Boundary) and entry.is_step]
        between = {at for at in steps[:-1] if self._entries[at] == Boundary(DECODE, is_step=True)}
        return tuple(entry for at, entry in enumerate(self._entries) if at not in between)


def calls_of(step: Tape) -> int:
    """Return the number of calls of denoisers in a step."""
    return 1 + step.count(Boundary(AGAIN))
