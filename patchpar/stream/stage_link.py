"""Messages from one stage to the next: one per block, with the receive posted before the send.

    message    header (sign, block, born, bytes of changes) and payload; changes and losses follow in a second message

While a stream rests, empty messages show that the sender is alive, so that the deadline of every receive stays short.
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Messages, TensorSpec, Work
from patchpar.errors import PlanError
from patchpar.shard.host_memory import to_device, to_host
from patchpar.stream.causal_model import Payload
from patchpar.stream.events import Change, pack, unpack
from patchpar.stream.messages import LostStage

HEADER = TensorSpec((4,), torch.int64)
HELD = 2
"""Sends in flight; one more waits for the oldest."""


def check_connected(ranks: int, comm: Communicator | None) -> None:
    """Raise PlanError for a plan of several ranks without a communicator between them."""
    if ranks > 1 and comm is None:
        raise PlanError(f"the plan has {ranks} ranks, but there is no communicator to the others")


def connected(comm: Communicator | None) -> Communicator:
    """Return the communicator of a plan that `check_connected` has accepted, where another rank is needed."""
    assert comm is not None, "several ranks have a communicator"
    return comm


class BlockSignal(enum.IntEnum):
    """Kind of a message or an order. VOID: a block of a cancelled stream, which is not computed.

    REFILL: a block that a decoder that has been restarted decodes once more, for the features that the next one needs.
    """

    BLOCK, REST, END, VOID, REFILL = range(5)

    @property
    def is_block(self) -> bool:
        """Whether the message carries a block."""
        return self in (BlockSignal.BLOCK, BlockSignal.VOID, BlockSignal.REFILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEnvelope:
    """A block in flight. `born`: start of its first step, in ns of time.time_ns. `changes`: they hold from it on.

    `lost`: states that were lost before it.
    """

    sign: BlockSignal
    block: int = -1
    born: int = 0
    changes: tuple[Change, ...] = ()
    payload: Payload = ()
    lost: tuple[LostStage, ...] = ()


class OutgoingMessages:
    """This rank's sends, kept until they are complete; at most HELD of them are in flight."""

    def __init__(self) -> None:
        self._held: deque[Work[Messages]] = deque()

    def add(self, message: Work[Messages]) -> None:
        """Add a send; waits for the oldest if there are too many. Raises ExchangeError."""
        self._held.append(message)
        while len(self._held) > HELD:
            self._held.popleft().wait()

    def settle(self) -> None:
        """Wait until all sends are complete. Raises ExchangeError."""
        while self._held:
            self._held.popleft().wait()


class Downstream:
    """Sends to the next stage, or to the other ranks of this stage, on global ranks `peers`."""

    def __init__(self, comm: Communicator, peers: Sequence[int], specs: Sequence[TensorSpec]) -> None:
        self._comm, self._peers = comm, tuple(peers)
        self._nothing = tuple(torch.zeros(s.shape, dtype=s.dtype, device=comm.transport.device) for s in specs)
        self._leaving = OutgoingMessages()

    def send(self, envelope: BlockEnvelope) -> None:
        """Start a send; waits only if the receiver is more than HELD messages late. Raises ExchangeError."""
        further = (*envelope.changes, *envelope.lost)
        packed = pack(further) if further else torch.empty(0, dtype=torch.uint8)
        device = self._comm.transport.device
        header = to_device(torch.tensor([envelope.sign, envelope.block, envelope.born, packed.numel()]), device)
        self._start("block", (header, *(envelope.payload or self._nothing)))
        if packed.numel():
            self._start("event", (to_device(packed, device),))

    def _start(self, kind: str, tensors: Payload) -> None:
        self._leaving.add(self._comm.send(kind, "stream", self._peers, [x.contiguous() for x in tensors]))

    def settle(self) -> None:
        """Wait until all sends are complete. Raises ExchangeError."""
        self._leaving.settle()


class Upstream:
    """Receives from the previous stage, on global rank `peer`. With `ahead` the next receive is posted in advance.

    This is not possible where other messages of that rank come in between.
    """

    def __init__(self, comm: Communicator, peer: int, specs: Sequence[TensorSpec], *, ahead: bool = True) -> None:
        self._comm, self._peer, self._specs, self._ahead = comm, peer, (HEADER, *specs), ahead
        self._next = self._expect() if ahead else None

    def _expect(self) -> Work[Messages]:
        return self._comm.receive("block", "stream", self._peer, self._specs)

    def take(self) -> BlockEnvelope:
        """Return the next message. Raises ExchangeError after the deadline."""
        header, *payload = (self._next or self._expect()).wait_for(0)
        sign, block, born, num_bytes = to_host(header).tolist()
        further: tuple[Change | LostStage, ...] = ()
        if num_bytes:
            spec = TensorSpec((num_bytes,), torch.uint8)
            further = unpack(self._comm.receive("event", "stream", self._peer, [spec]).wait_for(0)[0])
        if sign != BlockSignal.END and self._ahead:
            self._next = self._expect()
        return BlockEnvelope(
            sign=BlockSignal(sign),
            block=block,
            born=born,
            changes=tuple(change for change in further if not isinstance(change, LostStage)),
            payload=tuple(payload) if BlockSignal(sign).is_block else (),
            lost=tuple(lost for lost in further if isinstance(lost, LostStage)),
        )
