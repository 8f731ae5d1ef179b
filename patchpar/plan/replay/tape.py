"""One rank's program: what it computes, sends and waits for, in order."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kernel:
    """Computes for `seconds` on a device of speed 1."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Send:
    """Sends exchange `number` to each of `peers`, as one message of `num_bytes` each. `where`: the exchange point."""

    number: int
    peers: tuple[int, ...]
    kind: str
    num_bytes: int
    where: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until exchange `number` of `sender` has arrived, `num_bytes` of it. `where`: the exchange point."""

    number: int
    sender: int
    num_bytes: int
    where: str = ""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where a block or a step begins; takes no time."""

    name: str


TapeEntry = Kernel | Send | Wait | Boundary
Tape = tuple[TapeEntry, ...]
