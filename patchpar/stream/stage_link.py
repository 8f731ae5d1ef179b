"""Messages from one stage to the next: up to three for each block.

    header     sign, block, born, bytes of changes; through the host
    payload    latents and inputs, once they are computed; from device to device, where there is a link
    event      changes and losses, if there are any; through the host

A header says that its payload is ready, so that no device waits for another one that still computes or rests. While a
stream rests, headers alone show that the sender is alive: the deadline of every receive stays short.
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Incoming, Messages, TensorSpec, Work
from patchpar.stream.events import Change, pack, unpack
from patchpar.stream.messages import LostStage

Payload = tuple[Tensor, ...]
HEADER, SIZE = TensorSpec((4,), torch.int64), TensorSpec((1,), torch.int64)
WHERE = "stream"
HELD = 2
"""Blocks whose sends are in flight; one more waits for the oldest."""


def connected(comm: Communicator | None) -> Communicator:
    """Return the communicator of a plan of several ranks."""
    assert comm is not None, "several ranks have a communicator"
    return comm


class BlockSignal(enum.IntEnum):
    """Kind of a message or an order. VOID: a block of a cancelled stream, which is not computed.

    REFILL: a block that a decoder that has been restarted decodes once more, for the features that the next one needs.
    """

    BLOCK, REST, END, VOID, REFILL = range(5)

    @property
    def is_block(self) -> bool:
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


def send_in_host(comm: Communicator, kind: str, peers: Sequence[int], x: Tensor) -> Work[Messages]:
    """Start sending a tensor of any shape, which is in host memory, to ranks `peers`."""
    return comm.host.send(kind, WHERE, peers, [x])


def receive_in_host(comm: Communicator, kind: str, peer: int, spec: TensorSpec) -> Work[Messages]:
    """Start receiving a tensor from rank `peer` that stays in host memory."""
    into = (torch.empty(spec.shape, dtype=spec.dtype),)
    return comm.host.send_recv(kind, WHERE, [], [Incoming(peer, (spec,), into)])


def send_object(comm: Communicator, kind: str, peer: int, value: Any) -> None:
    """Send what `pack` takes to rank `peer`, through the host. Raises ExchangeError."""
    packed = pack(value)
    for x in (torch.tensor([packed.numel()]), packed):
        send_in_host(comm, kind, [peer], x).wait()


def received_object(comm: Communicator, kind: str, peer: int) -> Any:
    """Return what `send_object` sends on rank `peer`. Raises ExchangeError."""
    (size,) = receive_in_host(comm, kind, peer, SIZE).wait_for(0)[0].tolist()
    return unpack(receive_in_host(comm, kind, peer, TensorSpec((size,), torch.uint8)).wait_for(0)[0])


class OutgoingMessages:
    """This rank's sends, kept until they are complete; those of at most HELD blocks are in flight."""

    def __init__(self) -> None:
        self._held: deque[Sequence[Work[Messages]]] = deque()

    def add(self, *of_block: Work[Messages]) -> None:
        """Add the sends of a block; waits for the oldest if there are too many. Raises ExchangeError."""
        self._held.append(of_block)
        self.settle(HELD)

    def settle(self, left: int = 0) -> None:
        """Wait until the sends of all blocks but `left` are complete. Raises ExchangeError."""
        while len(self._held) > left:
            for message in self._held.popleft():
                message.wait()


class Downstream(OutgoingMessages):
    """Sends to the next stage, or to the other ranks of this stage, on global ranks `peers`."""

    def __init__(self, comm: Communicator, peers: Sequence[int]) -> None:
        super().__init__()
        self._comm, self._peers = comm, tuple(peers)

    def send(self, envelope: BlockEnvelope) -> None:
        """Start a send; waits only if the receiver is more than HELD blocks late. Raises ExchangeError."""
        comm, peers, further = self._comm, self._peers, (envelope.changes, envelope.lost)
        packed = pack(further) if any(further) else torch.empty(0, dtype=torch.uint8)
        header = torch.tensor([envelope.sign, envelope.block, envelope.born, packed.numel()])
        if envelope.payload:
            comm.transport.settle(WHERE)
        messages = [send_in_host(comm, "block", peers, header)]
        if envelope.payload:
            messages.append(comm.send("payload", WHERE, peers, [x.contiguous() for x in envelope.payload]))
        if packed.numel():
            messages.append(send_in_host(comm, "event", peers, packed))
        self.add(*messages)


class Upstream:
    """Receives from the previous stage, on global rank `peer`. With `ahead` the next header is expected in advance.

    This is not possible where other messages of that rank come in between.
    """

    def __init__(self, comm: Communicator, peer: int, specs: Sequence[TensorSpec], *, ahead: bool = True) -> None:
        self._comm, self._peer, self._specs, self._ahead = comm, peer, tuple(specs), ahead
        self._next = self._expect() if ahead else None

    def _expect(self) -> Work[Messages]:
        return receive_in_host(self._comm, "block", self._peer, HEADER)

    def take(self) -> BlockEnvelope:
        """Return the next message. Raises ExchangeError after the deadline."""
        (header,) = (self._next or self._expect()).wait_for(0)
        number, block, born, num_bytes = header.tolist()
        sign = BlockSignal(number)
        payload = received(self._comm, "payload", self._peer, self._specs) if sign.is_block else ()
        changes, lost = (), ()
        if num_bytes:
            spec = TensorSpec((num_bytes,), torch.uint8)
            changes, lost = unpack(receive_in_host(self._comm, "event", self._peer, spec).wait_for(0)[0])
        if sign is not BlockSignal.END and self._ahead:
            self._next = self._expect()
        return BlockEnvelope(sign=sign, block=block, born=born, changes=changes, payload=payload, lost=lost)


def received(comm: Communicator, kind: str, peer: int, specs: Sequence[TensorSpec]) -> Payload:
    """Return the tensors of one message of global rank `peer`, of the shapes that `specs` state, once they are here.

    Raises ExchangeError: never are they what a device had before a message that did not arrive.
    """
    found = comm.receive(kind, WHERE, peer, specs).wait_for(0)
    comm.transport.settle(WHERE)
    return tuple(found)
