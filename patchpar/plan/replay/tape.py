"""One rank's program: what it computes, sends and waits for, in order.

A recorded tape has operators, whose time depends on the device. `price.Prices` makes kernels of them. Entries are named
tuples: a plan has some hundred thousand, and a frozen dataclass takes several times as long to make and to hash.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

AGAIN = "another call"
"""The name of a boundary where a denoiser is called that is not the first of its step."""
QUESTIONS = frozenset(("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"))
"""Operators whose result the process needs a value for: it waits for the device."""
COPIED = "host"
"""The kind of copies from the host's memory, messages that a rank sends itself, in tapes and statistics."""


class Operator(NamedTuple):
    """A call of one of torch's operators: what its kernel computes, and reads and writes if nothing is in a cache.

    `dims`: (m, n, k) of a matrix product, also of a convolution written as one; (queries, keys, width) of attention,
    the queries of all heads together; (rows, width) of an RMS norm that is one kernel; empty for all others, which the
    memory limits.
    """

    name: str
    dtype: str
    flops: int
    num_bytes: int
    dims: tuple[int, ...] = ()


class Kernel(NamedTuple):
    """Computes for `seconds` on a device of speed 1.

    `host`: seconds for which the process launches it, or the kernels that it stands for. `lag`: seconds from the first
    launch to the end on a device that waits for launches only; None is `host + seconds`. `waits`: the process waits for
    its end.
    """

    name: str
    seconds: float
    host: float = 0.0
    lag: float | None = None
    waits: bool = False

    @property
    def after_launch(self) -> float:
        """Seconds from the first launch to the end, if the device has nothing else to do."""
        return self.host + self.seconds if self.lag is None else self.lag

    def then(self, other: "Kernel") -> "Kernel":
        """Return one kernel that stands for this and the `other` after it."""
        lag = max(self.after_launch + other.seconds, self.host + other.after_launch)
        return Kernel(self.name, self.seconds + other.seconds, self.host + other.host, lag)


class Send(NamedTuple):
    """Sends exchange `number` to each of `peers`, as one message of `num_bytes` each. `where`: the exchange point.

    `parts`: the bytes by kind, where a message has several. `bulk`: messages that are not need not queue behind it.
    `operation`: of several ranks, as NCCL has them, counted by this one: a message leaves when its receiver has come to
    it too (`Receive`); 0: it leaves at once.
    """

    number: int
    peers: tuple[int, ...]
    kind: str
    num_bytes: int
    where: str = ""
    parts: tuple[tuple[str, int], ...] = ()
    bulk: bool = False
    operation: int = 0

    def to(self, *peers: int, number: int | None = None) -> "Send":
        """Return the same message to other ranks, and as another exchange if `number` is given."""
        number = self.number if number is None else number
        return Send(number, peers, self.kind, self.num_bytes, self.where, self.parts, self.bulk, self.operation)


class Receive(NamedTuple):
    """Comes to exchange `number` of `sender`, which leaves no earlier if it is one of an operation."""

    number: int
    sender: int
    where: str = ""

    def of(self, sender: int) -> "Receive":
        """Return the same of another rank."""
        return Receive(self.number, sender, self.where)


class Wait(NamedTuple):
    """Waits until exchange `number` of `sender` has arrived, `num_bytes` of it. `where`: the exchange point."""

    number: int
    sender: int
    num_bytes: int
    where: str = ""
    kind: str = ""

    def of(self, sender: int) -> "Wait":
        """Return the wait for the same message of another rank."""
        return Wait(self.number, sender, self.num_bytes, self.where, self.kind)


class Leave(NamedTuple):
    """Waits until all that this rank sends in one of its operations has arrived. `where`: the exchange point."""

    operation: int
    where: str = ""
    kind: str = ""


class Boundary(NamedTuple):
    """Where a block or a step begins; takes no time. `is_step`: a phase of the call, such as step 3 or decoding."""

    name: str
    is_step: bool = False


TapeEntry = Operator | Kernel | Send | Receive | Wait | Leave | Boundary
Tape = tuple[TapeEntry, ...]


def bytes_copied(tape: Iterable[TapeEntry]) -> int:
    """Return the bytes that a rank copies from the host's memory."""
    return sum(entry.num_bytes for entry in tape if isinstance(entry, Send) and entry.kind == COPIED)


def bytes_sent(tape: Iterable[TapeEntry]) -> Counter[str]:
    """Return the bytes that a rank sends to others, by kind, counted once per receiver."""
    found: Counter[str] = Counter()
    for entry in tape:
        if isinstance(entry, Send) and entry.kind != COPIED:
            for kind, num_bytes in entry.parts or ((entry.kind, entry.num_bytes),):
                found[kind] += len(entry.peers) * num_bytes
    return found


def steps_of(tape: Tape) -> dict[str, Tape]:
    """Return the parts of a tape by the name of their phase, in order; "" is what comes before the first."""
    found: dict[str, list[TapeEntry]] = {"": []}
    part = found[""]
    for entry in tape:
        if type(entry) is Boundary and entry.is_step:
            part = found.setdefault(entry.name, [])
        part.append(entry)
    return {name: tuple(part) for name, part in found.items() if part}
