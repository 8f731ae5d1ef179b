"""Messages from device to device between ranks with a GPU each, over a process group for each direction of a link.

    rank 0 --- group from 0 to 1 ---> rank 1 --- group from 1 to 2 ---> rank 2
      ^------------------ group from 2 to 0 -----------------------------|

NCCL carries out the operations of a group in order, and one whose other side has not begun holds up those behind it.
In groups of their own, messages of one link wait for those of no other link, nor of the other direction. What a rank
has to know beforehand, such as whether a message follows at all, goes through `host`, and so do messages between ranks
without a link, such as two on one GPU. Ours.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from patchpar.comm.transport.group_transport import GroupTransport
from patchpar.comm.transport.link_groups import LinkGroups, Pair, RendezvousFiles
from patchpar.comm.transport.message import Incoming, Messages, Outgoing, TensorSpec, Work
from patchpar.comm.transport.packing import layout_of, pack
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.comm.transport.stream_waits import StreamWaits
from patchpar.comm.transport.torch_collectives import TorchCollectives
from patchpar.comm.transport.torch_work import TorchWork
from patchpar.errors import ExchangeError
from patchpar.launch.accelerators import HOST_BACKENDS, select_device

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PROBE = "a new link"


class LinkTransport(GroupTransport):
    """Messages over `host`, and over links from device to device once `renew` has made some.

    `backend`: of torch.distributed. `card`: an id of this rank's device, which no other device has; empty for none.
    """

    def __init__(self, host: SharedMemoryTransport, backend: str, card: str) -> None:
        self.host, self.backend, self.card = host, backend, card
        self.rank, self.device = host.rank, host.device
        self.waits: StreamWaits | None = None
        self.has_formed = False
        self._groups: LinkGroups = LinkGroups(backend, self.device, self.rank, host.deadline)
        self._of_sets = self.collectives = TorchCollectives(self._groups, self.device, self._start)
        self.files, self.generation = RendezvousFiles(), 0

    @property
    def deadline(self) -> float:
        """Seconds of one wait."""
        return self.host.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self.host.deadline = seconds

    @property
    def waiting(self) -> AbstractContextManager[None]:
        """Entered while the process only waits for another rank."""
        return self.host.waiting

    @waiting.setter
    def waiting(self, manager: AbstractContextManager[None]) -> None:
        self.host.waiting = manager

    def renew(self, store: "Store | None", pairs: Sequence[Pair], sets: Sequence[tuple[int, ...]]) -> None:
        """Make the groups of these links and sets of ranks, in place of earlier ones, and send something through each.

        `store`: where they meet, new to all of them; None without links. Collective: all ranks name the same links and
        sets, in the same order. Raises ExchangeError.
        """
        self._forget()
        self.recover()
        if self.backend not in HOST_BACKENDS:
            self.waits = StreamWaits(
                self.device.type,
                lambda: self.deadline,
                self.poison,
                self._report_wait,
                lambda: self.host.is_cut,
                partial(select_device, str(self.device)),
            )
        try:
            if store is not None:
                with self.waiting:
                    self._groups.renew(store, pairs, sets)
            probe = partial(self._probe, pairs, [ranks for ranks in sets if self.rank in ranks])
            self._groups.in_time(probe, f"a link of rank {self.rank}")
        except RuntimeError as error:
            text = f"rank {self.rank} cannot connect its device with those of others through {self.backend}: {error}"
            self.poison(text)
            raise ExchangeError(text) from error
        self.has_formed = True

    def _probe(self, pairs: Sequence[Pair], sets: Sequence[tuple[int, ...]]) -> None:
        """NCCL connects at the first operation: not in the middle of a stream. Raises ExchangeError."""
        x = torch.full((1,), self.rank, dtype=torch.int64, device=self.device)
        for sender, receiver in (pair for pair in pairs if pair in self._groups.links):
            if sender == self.rank:
                self._exchange([Outgoing((receiver,), (x,))], [], PROBE).wait()
            else:
                self._exchange([], [Incoming(sender, (TensorSpec.of(x),))], PROBE).wait()
            self.settle(PROBE)
        for ranks in sets:
            self._of_sets.all_gather(ranks, x, x.new_empty(len(ranks)), (), PROBE).wait()
            self.settle(PROBE)

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> Work[Messages]:
        """Start an exchange: what has a link goes through it, and all else through the host. Raises ExchangeError."""
        links = self._groups.links
        linked, others = list[Outgoing](), list[Outgoing]()
        for message in outgoing:
            direct = tuple(peer for peer in message.peers if (self.rank, peer) in links)
            rest = tuple(peer for peer in message.peers if peer not in direct)
            linked += [Outgoing(direct, message.tensors)] if direct else []
            others += [Outgoing(rest, message.tensors)] if rest else []
        at = [index for index, message in enumerate(incoming) if (message.peer, self.rank) in links]
        if not linked and not at:
            self.check(where)
            return self.host.send_recv(outgoing, incoming, where)
        direct_work = self._exchange(linked, [incoming[index] for index in at], where)
        at_host = [index for index in range(len(incoming)) if index not in at]
        if not others and not at_host:
            return direct_work
        by_host = self.host.send_recv(others, [incoming[index] for index in at_host], where)
        return JointWork([(direct_work, at), (by_host, at_host)], incoming, where)

    def _exchange(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> TorchWork[Messages]:
        """Start messages through links, receives first; one without tensors is none."""
        outgoing = [message for message in outgoing if message.tensors]
        received = [layout_of(message.specs).empty(self.device) for message in incoming]
        sent = [pack([x.to(self.device) for x in message.tensors]) for message in outgoing]
        begin = partial(self._begin, incoming, received, outgoing, sent)
        return self._start(TorchWork, begin, (sent, received), incoming, where)

    def _begin(
        self,
        incoming: Sequence[Incoming],
        received: Sequence[torch.Tensor],
        outgoing: Sequence[Outgoing],
        sent: Sequence[torch.Tensor],
    ) -> list[dist.Work]:
        links = self._groups.links
        expected = [(message.peer, x) for message, x in zip(incoming, received, strict=True) if message.specs]
        works = [links[peer, self.rank].recv([x], 0, 0) for peer, x in expected]
        return works + [
            links[self.rank, peer].send([x], 1, 0)
            for message, x in zip(outgoing, sent, strict=True)
            for peer in message.peers
        ]

    def settle(self, where: str) -> None:
        """Block until all messages waited for have arrived, and the device is done. Raises ExchangeError."""
        super().settle(where)
        if self.waits is not None:
            self.waits.finish()

    def poison(self, reason: str) -> None:
        """See `Poisonable`. The host's messages go on: through them the ranks agree on new groups."""
        super().poison(reason)
        self.has_formed = False

    def _forget(self) -> None:
        """Release all groups."""
        self._groups.destroy()
        self._of_sets.forget()
        if self.waits is not None:
            self.waits.close()
        self.waits, self.has_formed = None, False

    def close(self) -> None:
        """Release all groups, and close the host's transport. Idempotent."""
        self._forget()
        self.host.close()


class JointWork(Work[Messages]):
    """Messages of several works: each with the positions of its messages among `incoming`."""

    def __init__(
        self, parts: Sequence[tuple[Work[Messages], Sequence[int]]], incoming: Sequence[Incoming], where: str
    ) -> None:
        super().__init__(incoming, where)
        self._parts = [work for work, _ in parts]
        self._at = {index: (work, number) for work, at in parts for number, index in enumerate(at)}

    def _receive(self, index: int) -> list[torch.Tensor]:
        work, number = self._at[index]
        return work.wait_for(number)

    def _leave(self) -> None:
        for work in self._parts:
            work.wait()
