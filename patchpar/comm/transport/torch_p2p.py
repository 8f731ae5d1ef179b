"""Messages through torch.distributed: NCCL between GPUs, gloo between hosts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from patchpar.comm.transport.message import Incoming, Outgoing
from patchpar.comm.transport.stream_waits import StreamStall, StreamWaits
from patchpar.errors import ExchangeError


class TorchTransport:
    """One rank's place in torch.distributed's default group. Gloo carries CPU tensors only, so others are staged.

    With NCCL it is the GPU that waits: see `StreamWaits`. All ranks make theirs together.
    """

    def __init__(self, device: torch.device, deadline: float) -> None:
        self.rank, self.device, self.deadline = dist.get_rank(), device, deadline
        self.waiting: AbstractContextManager[None] = nullcontext()
        self.staged = dist.get_backend() == "gloo" and device.type != "cpu"
        self._wire = torch.device("cpu") if self.staged else device
        self.waits = StreamWaits(lambda: self.deadline) if dist.get_backend() == "nccl" else None
        if self.waits is not None:  # its first exchange must have all ranks of the group, and ours need not
            dist.barrier(device_ids=[torch.cuda.current_device() if device.index is None else device.index])

    def swap(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> "TorchWork":
        """Start all messages of one exchange together, receives first. Raises ExchangeError for an earlier one."""
        if self.waits is not None:
            self.waits.look_back()
        received = [[torch.empty(s.shape, dtype=s.dtype, device=self._wire) for s in m.specs] for m in incoming]
        sent = [[x.to(self._wire).contiguous() for x in message.tensors] for message in outgoing]
        ops = [
            dist.P2POp(dist.irecv, x, message.peer)
            for message, tensors in zip(incoming, received, strict=True)
            for x in tensors
        ]
        ops += [
            dist.P2POp(dist.isend, x, peer)
            for message, tensors in zip(outgoing, sent, strict=True)
            for peer in message.peers
            for x in tensors
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        return TorchWork(self, works, received, (sent, incoming, where))

    def close(self) -> None:
        """Nothing of our own to close: the group belongs to whoever made it."""


class TorchWork:
    """Works in flight, with their tensors: dropping the handle of a gloo send would hang the receiver."""

    def __init__(
        self,
        transport: TorchTransport,
        works: Sequence[dist.Work],
        received: list[list[Tensor]],
        context: tuple[list[list[Tensor]], Sequence[Incoming], str],
    ) -> None:
        self._transport, self._works, self._received = transport, list(works), received
        self._sent, self._incoming, where = context
        self._missing = partial(_missing, transport.rank, where, self._incoming)
        self._stalls: tuple[StreamStall, ...] = ()
        self._placed = False

    def is_here(self, index: int) -> bool:
        """Whether the batch is known to have come: with gloo only once it has been waited for."""
        return all(work.is_completed() for work in self._works)

    def wait_for(self, index: int) -> list[Tensor]:
        """One message. Works of a batch may be coalesced, so this waits for the batch."""
        return self.wait()[index]

    def wait(self) -> list[list[Tensor]]:
        """All messages, both ways."""
        try:
            self._await()
        except RuntimeError as error:
            raise ExchangeError(f"{self._missing()} within {self._transport.deadline:g} s ({error})") from error
        self._sent.clear()
        if not self._placed:
            pairs = zip(self._incoming, self._received, strict=True)
            self._received, self._placed = [self._place(message, tensors) for message, tensors in pairs], True
        return self._received

    def stalls(self) -> Sequence[StreamStall]:
        """With NCCL, how long the stream stands for what has been waited for; told once."""
        found, self._stalls = self._stalls, ()
        return found

    def _await(self) -> None:
        if self._transport.waits is not None and self._works:
            self._stalls = (self._transport.waits.wait_for(self._works, self._missing),)
            self._works.clear()
        with self._transport.waiting:
            while self._works:
                self._works[0].wait(timedelta(seconds=self._transport.deadline))
                self._works.pop(0)

    def _place(self, message: Incoming, tensors: list[Tensor]) -> list[Tensor]:
        """Off the wire, and to where the message wants them."""
        into = message.into or [None] * len(tensors)
        device = self._transport.device
        return [x.to(device) if own is None else own.copy_(x) for own, x in zip(into, tensors, strict=True)]


def _missing(rank: int, where: str, incoming: Sequence[Incoming]) -> str:
    peers = sorted({message.peer for message in incoming})
    shapes = [spec.shape for message in incoming for spec in message.specs]
    return f"rank {rank} at {where}: no message from ranks {peers} of shapes {shapes}"
