"""Operations in which all ranks of a group take part at once: one of torch.distributed's collectives each."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from patchpar.comm.transport.message import FlatParts, Incoming, Messages, Outgoing, Work
from patchpar.comm.transport.message_memory import MessageMemory, buffer_for
from patchpar.comm.transport.packing import pack_row, row_of
from patchpar.comm.transport.torch_groups import ProcessGroups

Buffers = tuple[Sequence[Tensor], Sequence[Tensor]]
Start = Callable[[Callable[[], Sequence[dist.Work]], Buffers, Sequence[Incoming], str], Work[Messages]]


class TorchCollectives:
    """See `Collectives`. `start(begin, buffers, incoming, where)` begins one; buffers: sent, and of each message."""

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
        buffers: tuple[Tensor, Tensor],
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Messages]:
        """See `Collectives`."""
        own, rows = buffers
        group = self._groups.of(ranks, bulk=bulk)
        # `all_gather_into_tensor` is its name up to torch 2.12, deprecated since.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

        def begin() -> Sequence[dist.Work]:
            return [gather(rows.view(-1), own, group=group, async_op=True)]

        received = [rows[ranks.index(message.peer)] for message in incoming]
        return self._start(begin, ([own], received), incoming, where)

    def all_to_all(
        self, ranks: tuple[int, ...], own: FlatParts, into: FlatParts, incoming: Sequence[Incoming], where: str
    ) -> Work[Messages]:
        """See `Collectives`."""
        group = self._groups.of(ranks, bulk=False)
        sizes, parts = (list(into.sizes), list(own.sizes)), into.parts()

        def begin() -> Sequence[dist.Work]:
            return [dist.all_to_all_single(into.buffer, own.buffer, *sizes, group=group, async_op=True)]

        received = [parts[ranks.index(message.peer)] for message in incoming]
        return self._start(begin, ([own.buffer], received), incoming, where)

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
        group = self._groups.of(ranks, bulk=bulk)

        def begin() -> Sequence[dist.Work]:
            return [dist.all_to_all_single(received, sent, row.sizes, row_sent.sizes, group=group, async_op=True)]

        buffers = row.buffers(received)
        by_message = [buffers[ranks.index(message.peer)] for message in incoming]
        return self._start(begin, ([sent], by_message), incoming, where)
