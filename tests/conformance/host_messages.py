"""Messages through the host's memory between ranks that are threads which take turns, see `turns`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from patchpar.comm.transport import Incoming, Messages, Outgoing, Work
from patchpar.comm.transport.poison import Poisonable
from tests.conformance.stand_in import StandIn

Sent = defaultdict[tuple[int, int], list[list[Tensor]]]
"""Messages so far, by sender and receiver."""


class HostMessages(Poisonable):
    """Stands for a SharedMemoryTransport. `sizes`: bytes of each message that this rank has sent."""

    collectives = None
    is_cut = False

    def __init__(self, rank: int, stand_in: StandIn, sent: Sent) -> None:
        self.rank, self.device, self.deadline = rank, torch.device("cpu"), 60.0
        self.waiting: AbstractContextManager[None] = nullcontext()
        self.turns, self.sent = stand_in.turns, sent
        self.taken: dict[int, int] = defaultdict(int)
        self.sizes: list[int] = []

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> HostWork:
        self.sizes += [message.num_bytes // len(message.peers) for message in outgoing]
        for message in outgoing:
            for peer in message.peers:
                self.sent[self.rank, peer].append([x.clone() for x in message.tensors])
        return HostWork(self, incoming, where)

    def settle(self, where: str) -> None:
        self.check(where)

    def close(self) -> None: ...


class HostWork(Work[Messages]):
    def __init__(self, host: HostMessages, incoming: Sequence[Incoming], where: str) -> None:
        super().__init__(incoming, where)
        self._host, self._numbers = host, []
        for message in incoming:
            self._numbers.append(host.taken[message.peer])
            host.taken[message.peer] += 1

    def _is_here(self, index: int) -> bool:
        return len(self._host.sent[self.incoming[index].peer, self._host.rank]) > self._numbers[index]

    def _receive(self, index: int) -> list[Tensor]:
        message, host = self.incoming[index], self._host
        host.turns.wait(host.rank, lambda: self._is_here(index))
        found = host.sent[message.peer, host.rank][self._numbers[index]]
        assert [(tuple(x.shape), x.dtype) for x in found] == [(spec.shape, spec.dtype) for spec in message.specs]
        return [
            x if into is None else into.copy_(x) for x, into in zip(found, message.into or [None] * 9, strict=False)
        ]
