"""NCCL's rules, simulated: one queue of operations in order for each rank and communicator.

    messages       the operations of a group progress together; the n-th from one rank to another is the n-th that the
                   other receives from it. A group is over when all of its operations are
    collectives    all ranks of the communicator have to be at the same one, of the same sizes

An operation that is behind another in its queue does not begin. Broken rules are noted as faults.
"""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

MESSAGES = "messages"


class Buffer:
    """The memory of a tensor, which is not kept alive: that is the duty of whoever sends it."""

    def __init__(self, x: Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())
        self.key, self.start, self.num_bytes = x.untyped_storage().data_ptr(), x.data_ptr(), x.numel() * x.itemsize

    def part(self, start: int, num_bytes: int) -> Buffer:
        """Some of the bytes."""
        found = object.__new__(Buffer)
        found.storage, found.key, found.start, found.num_bytes = self.storage, self.key, self.start + start, num_bytes
        return found

    @property
    def is_freed(self) -> bool:
        """Whether nothing refers to the memory any more."""
        return self.num_bytes > 0 and self.storage.expired()


@dataclass(eq=False)
class Operation:
    """One message to or from `peer`, a global rank."""

    is_send: bool
    peer: int
    buffer: Buffer
    is_over: bool = False


@dataclass(eq=False)
class Group:
    """What a rank has posted as one: messages, or a collective of this `kind` with its buffers in order of ranks."""

    rank: int
    kind: str
    where: str
    operations: Sequence[Operation]
    stream: str
    has_begun: bool = False
    is_over: bool = False

    def __str__(self) -> str:
        ops = [f"{'to' if op.is_send else 'from'} {op.peer} ({op.buffer.num_bytes} bytes)" for op in self.operations]
        return f"rank {self.rank} at {self.where}: {self.kind} {', '.join(ops)}"


def _point(where: str) -> str:
    """An exchange point without the call: a guidance branch is sent by its call, and may be received by a later one."""
    return re.sub(r"^(guidance, step \d+), call \d+$", r"\1", where)


@dataclass(eq=False)
class SimulatedCommunicator:
    """The queues of all ranks of one communicator."""

    name: str
    ranks: tuple[int, ...]
    faults: list[str]
    threads: dict[int, int] = field(default_factory=dict)
    queues: dict[int, deque[Group]] = field(default_factory=lambda: defaultdict(deque))
    num_posted: int = 0
    _channels: dict[tuple[bool, int, int], list[tuple[Operation, Group]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def post(self, group: Group, thread: int) -> None:
        """Add to the queue of its rank."""
        if self.threads.setdefault(group.rank, thread) != thread:
            self.faults.append(f"{group} is posted on a second thread")
        self.num_posted += 1
        self.queues[group.rank].append(group)
        self.advance()

    def advance(self) -> None:
        """Carry out what can be: a message may end an operation of a rank that has been looked at before."""
        while any([self._step(rank) for rank in self.ranks]):
            pass

    def left(self) -> list[str]:
        """What is in the queues."""
        return [f"{self.name}: {group}" for rank in self.ranks for group in self.queues[rank]]

    def _step(self, rank: int) -> bool:
        """Carry out what can be of the first of a rank's queue; return whether another rank may go on by it."""
        if not self.queues[rank]:
            return False
        head = self.queues[rank][0]
        if head.kind != MESSAGES:
            return self._collective()
        if not head.has_begun:
            head.has_begun = True
            for op in head.operations:
                self._channel(rank, op).append((op, head))
        num_carried = sum([self._message(rank, op, head) for op in head.operations])
        head.is_over = all(op.is_over for op in head.operations)
        if head.is_over:
            self.queues[rank].popleft()
        return head.is_over or num_carried > 0

    def _channel(self, rank: int, op: Operation, *, other: bool = False) -> list[tuple[Operation, Group]]:
        """The operations so far of one side of a pair of ranks, in one direction."""
        pair = (rank, op.peer) if op.is_send else (op.peer, rank)
        return self._channels[(op.is_send != other, *pair)]

    def _message(self, rank: int, op: Operation, group: Group) -> bool:
        """Carry a message if both sides have begun; return whether that was now."""
        if op.is_over:
            return False
        own, others = self._channel(rank, op), self._channel(rank, op, other=True)
        number = next(index for index, (each, _) in enumerate(own) if each is op)
        if number >= len(others):
            return False
        other, peers_group = others[number]
        self._same_point([group, peers_group])
        send, receive = (op, other) if op.is_send else (other, op)
        self._carry(send.buffer, receive.buffer, group)
        op.is_over = other.is_over = True
        return True

    def _collective(self) -> bool:
        """Carry out a collective if all ranks are at one."""
        heads = [self.queues[rank][0] if self.queues[rank] else None for rank in self.ranks]
        groups = [head for head in heads if head is not None and head.kind != MESSAGES]
        if len(groups) < len(self.ranks):
            return False
        if len({group.kind for group in groups}) > 1:
            self.faults.append(f"different collectives meet: {'; '.join(map(str, groups))}")
        self._same_point(groups)
        for sender, group in zip(self.ranks, groups, strict=True):
            for op in group.operations:
                if op.is_send:
                    receiver = groups[self.ranks.index(op.peer)]
                    (into,) = (each for each in receiver.operations if not each.is_send and each.peer == sender)
                    self._carry(op.buffer, into.buffer, group)
        for group in groups:
            group.is_over = True
            self.queues[group.rank].popleft()
        return True

    def _same_point(self, groups: Sequence[Group]) -> None:
        if len({_point(group.where) for group in groups}) > 1:
            self.faults.append(f"operations of different exchange points meet: {'; '.join(map(str, groups))}")

    def _carry(self, send: Buffer, receive: Buffer, group: Group) -> None:
        if send.num_bytes != receive.num_bytes:
            self.faults.append(f"{group}: {send.num_bytes} bytes are sent where {receive.num_bytes} are received")
        elif send.is_freed or receive.is_freed:
            self.faults.append(f"{group}: its {'sent' if send.is_freed else 'receiving'} buffer has been freed")
        else:
            ctypes.memmove(receive.start, send.start, send.num_bytes)
