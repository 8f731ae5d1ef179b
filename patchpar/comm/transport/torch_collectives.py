"""Operations in which all ranks of a group take part at once: one of torch.distributed's collectives each."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from patchpar.comm.transport.message import FlatParts, Incoming, Messages, Outgoing, T, Work
from patchpar.comm.transport.message_memory import MessageMemory, buffer_for
from patchpar.comm.transport.packing import pack_row, row_of
from patchpar.comm.transport.torch_groups import ProcessGroups
from patchpar.comm.transport.torch_work import FilledBuffer, TorchWork

Buffers = tuple[Sequence[Tensor], Sequence[Tensor]]
Begin = Callable[[], Sequence[dist.Work]]
Handle = Callable[..., TorchWork[T]]
"""Makes a handle of transport, works, buffers, incoming messages and exchange point."""


class Start(Protocol):
    """Begins operations of a transport. `buffers`: those sent, and those of each message, or the one that is filled."""

    def __call__(
        self, handle: Handle[T], begin: Begin, buffers: Buffers, incoming: Sequence[Incoming], where: str, /
    ) -> TorchWork[T]:
        """Return the handle of operations that `begin` begins. Raises ExchangeError."""


class TorchCollectives:
    """See `Collectives`. `start` begins one."""

    def __init__(self, groups: ProcessGroups, device: torch.device, start: Start) -> None:
        self._groups, self._device, self._start = groups, device, start

    def form(self, sets: Sequence[tuple[int, ...]]) -> None:
        """See `Collectives`."""
        self._groups.form(sets, with_bulk=True)

    def covers(self, ranks: tuple[int, ...]) -> bool:
        """See `Collectives`."""
        return self._groups.has(ranks)

    def all_gather(
        self,
        ranks: tuple[int, ...],
        own: Tensor,
        rows: Tensor,
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Tensor]:
        """See `Collectives`; `own` [...] and `rows` [P, ...]."""
        begin = partial(_gather, self._groups.of(ranks, bulk=bulk), own, rows)
        return self._start(FilledBuffer, begin, ((own,), (rows,)), incoming, where)

    def gather_messages(
        self,
        ranks: tuple[int, ...],
        own: Tensor,
        rows: Tensor,
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Messages]:
        """See `Collectives`; `own` [...] and `rows` [P, ...]."""
        begin = partial(_gather, self._groups.of(ranks, bulk=bulk), own, rows)
        received = [rows[ranks.index(message.peer)] for message in incoming]
        return self._start(TorchWork, begin, ((own,), received), incoming, where)

    def all_to_all(
        self, ranks: tuple[int, ...], own: FlatParts, into: FlatParts, incoming: Sequence[Incoming], where: str
    ) -> Work[Tensor]:
        """See `Collectives`; flat parts are [elements]."""
        begin = partial(_to_all, self._groups.of(ranks, bulk=False), own, into)
        return self._start(FilledBuffer, begin, ((own.buffer,), (into.buffer,)), incoming, where)

    def exchange(
        self,
        ranks: tuple[int, ...],
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
        memory: MessageMemory | None = None,
    ) -> Work[Messages]:
        """See `Collectives`."""
        leaving = {peer: message.tensors for message in outgoing for peer in message.peers}
        pending = {message.peer: message.specs for message in incoming}
        sent, row_sent = pack_row([leaving.get(rank, ()) for rank in ranks], self._device, memory)
        row = row_of(tuple(pending.get(rank, ()) for rank in ranks))
        received = buffer_for(memory, "received", row.size, torch.uint8, self._device)
        own, into = FlatParts(sent, row_sent.sizes), FlatParts(received, row.sizes)
        begin = partial(_to_all, self._groups.of(ranks, bulk=bulk), own, into)
        buffers = row.buffers(received)
        by_message = [buffers[ranks.index(message.peer)] for message in incoming]
        return self._start(TorchWork, begin, ((sent,), by_message), incoming, where)


def _gather(group: dist.ProcessGroup, own: Tensor, rows: Tensor) -> Sequence[dist.Work]:
    # `all_gather_into_tensor` is its name up to torch 2.12, deprecated since.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    if rows.ndim != own.ndim:  # gloo takes parts that follow each other in the first dim only
        rows, own = rows.view(-1), own if own.ndim == 1 else own.view(-1)
    return [gather(rows, own, group=group, async_op=True)]


def _to_all(group: dist.ProcessGroup, own: FlatParts, into: FlatParts) -> Sequence[dist.Work]:
    sizes = list(into.sizes), list(own.sizes)
    return [dist.all_to_all_single(into.buffer, own.buffer, *sizes, group=group, async_op=True)]
