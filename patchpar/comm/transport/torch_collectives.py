"""Operations in which all ranks of a group take part at once: one of torch.distributed's collectives each.

The methods of the groups themselves are called: torch.distributed's functions check with each call what never changes
here, and take as long for that as all of patchpar takes for an exchange.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions  # type: ignore[attr-defined]

from patchpar.comm.transport.message import FlatParts, Incoming, Messages, Outgoing, T, Work
from patchpar.comm.transport.message_memory import MessageMemory, buffer_for
from patchpar.comm.transport.packing import pack_row, row_of
from patchpar.comm.transport.symmetric_memory import SLOT, PeerMemory, formed
from patchpar.comm.transport.torch_groups import ProcessGroups
from patchpar.comm.transport.torch_work import FilledBuffer, TorchWork
from patchpar.launch.accelerators import HOST_BACKENDS

LARGE = 2**21  # bytes
CONNECTING = "the first exchange of these ranks"
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
        self._connected: set[tuple[int, ...]] = set()
        self._methods = _KnownMethods(groups)
        self._peers: dict[tuple[int, ...], PeerMemory] = {}  # in use
        self._tried: dict[tuple[int, ...], PeerMemory | None] = {}

    def form(self, sets: Sequence[tuple[int, ...]], *, symmetric_memory: bool = False) -> None:
        """See `Collectives`."""
        self._groups.form(sets, with_bulk=True)
        self._peers.clear()
        for ranks in filter(self._groups.has, sets):
            if self._groups.backend not in HOST_BACKENDS and ranks not in self._connected:
                self._groups.in_time(partial(self._connect, ranks), f"the connection of ranks {list(ranks)}")
        for ranks in filter(self._groups.has, sets) if symmetric_memory else ():
            if ranks not in self._tried:
                group = self._groups.of(ranks, bulk=False)
                self._tried[ranks] = formed(ranks, group, self._device, partial(self._gathered, ranks))
            if found := self._tried[ranks]:
                self._peers[ranks] = found

    def _connect(self, ranks: tuple[int, ...]) -> None:
        """Use each kind of operation once. NCCL connects in the first call, of small ones otherwise than of large ones.

        That call returns when the others have come to it: no step waits there.
        """
        sizes = [1] * len(ranks)
        for bulk in (False, True):
            for size in (1, LARGE):
                own = torch.zeros(size, dtype=torch.uint8, device=self._device)
                self.all_gather(ranks, own, own.new_empty(len(ranks), size), (), CONNECTING, bulk=bulk).wait()
            sent, into = (FlatParts(torch.zeros(len(ranks), device=self._device), sizes) for _ in range(2))
            self.all_to_all(ranks, sent, into, (), CONNECTING, bulk=bulk).wait()
        self._connected.add(ranks)

    def _gathered(self, ranks: tuple[int, ...], own: Tensor) -> Tensor:
        """Return `own` [N] of all ranks, [P, N]."""
        rows = own.new_empty((len(ranks), *own.shape))
        return self.all_gather(ranks, own, rows, (), "symmetric memory").wait()

    def abort(self) -> None:
        """End exchanges in symmetric memory that are on their way."""
        for peers in list(self._peers.values()):  # from the thread of deadlines, while another may form one
            peers.give_up()

    def forget(self) -> None:
        """Forget groups that have been made anew."""
        self._methods.clear()
        self._connected.clear()

    def covers(self, ranks: tuple[int, ...]) -> bool:
        """See `Collectives`."""
        return (ranks, True) in self._methods or self._groups.has(ranks)

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
        way: PeerMemory | _GroupMethods | None = None
        if self._peers and not bulk and own.numel() * own.element_size() <= SLOT:
            way = self._peers.get(ranks)
        way = way or self._methods[ranks, bulk]
        begin = partial(way.all_gather, own, rows)
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
        begin = partial(self._methods[ranks, bulk].all_gather, own, rows)
        received = [rows[ranks.index(message.peer)] for message in incoming]
        return self._start(TorchWork, begin, ((own,), received), incoming, where)

    def all_to_all(
        self,
        ranks: tuple[int, ...],
        own: FlatParts,
        into: FlatParts,
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Tensor]:
        """See `Collectives`; flat parts are [elements]."""
        way: PeerMemory | _GroupMethods | None = None
        if self._peers and own.alike and max(*own.sizes, *into.sizes) * own.buffer.element_size() <= SLOT:
            way = self._peers.get(ranks)
        way = way or self._methods[ranks, bulk]
        begin = partial(way.all_to_all, own, into)
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
        begin = partial(self._methods[ranks, bulk].all_to_all, own, into)
        buffers = row.buffers(received)
        by_message = [buffers[ranks.index(message.peer)] for message in incoming]
        return self._start(TorchWork, begin, ((sent,), by_message), incoming, where)


class _GroupMethods:
    """The collectives of a process group."""

    def __init__(self, group: Any) -> None:
        # The second names are those of torch up to 2.12.
        self._gather = getattr(group, "all_gather_single", None) or group._allgather_base
        self._to_all = getattr(group, "all_to_all_single", None) or group.alltoall_base
        self._options = _in_its_own_stream(AllgatherOptions()), _in_its_own_stream(AllToAllOptions())

    def all_gather(self, own: Tensor, rows: Tensor) -> Sequence[dist.Work]:
        """Begin to gather `own` [...] of all ranks into `rows` [P, ...]."""
        if rows.ndim != own.ndim:  # gloo takes parts that follow each other in the first dim only
            rows, own = rows.view(-1), own if own.ndim == 1 else own.view(-1)
        return (self._gather(rows, own, self._options[0]),)

    def all_to_all(self, own: FlatParts, into: FlatParts) -> Sequence[dist.Work]:
        """Begin to send each rank its part of `own` [elements], and to receive `into` [elements]."""
        return (self._to_all(into.buffer, own.buffer, into.sizes, own.sizes, self._options[1]),)


class _KnownMethods(dict[tuple[tuple[int, ...], bool], _GroupMethods]):
    """Those of sets of ranks, of bulk or not, found once: what is known costs no call of Python."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self._groups = groups

    def __missing__(self, which: tuple[tuple[int, ...], bool]) -> _GroupMethods:
        ranks, bulk = which
        found = self[which] = _GroupMethods(self._groups.of(ranks, bulk=bulk))
        return found


def _in_its_own_stream(options: Any) -> Any:
    """Return the options of a collective that the current stream does not wait for, unless told to."""
    if hasattr(options, "asyncOp"):  # before torch had it, none was waited for
        options.asyncOp = True
    return options
