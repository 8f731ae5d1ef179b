"""Messages through torch.distributed: NCCL between GPUs, gloo between hosts. One operation for each message."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from patchpar.comm.transport.message import Incoming, Messages, Outgoing, Work
from patchpar.comm.transport.packing import layout_of, pack
from patchpar.comm.transport.stream_waits import StreamStall, StreamWaits
from patchpar.comm.transport.torch_collectives import TorchCollectives
from patchpar.errors import ExchangeError
from patchpar.launch.accelerators import HOST_BACKENDS, group_backend


class TorchTransport:
    """Messages in torch.distributed's default group. Gloo carries CPU tensors only, so others are copied to the CPU.

    With NCCL the GPU's stream waits: see `StreamWaits`. `collectives` are used with NCCL, or if `collective` says so.
    Collective: all ranks construct theirs together.
    """

    def __init__(self, device: torch.device, deadline: float, *, collective: bool = False) -> None:
        self.rank, self.device, self.deadline = dist.get_rank(), device, deadline
        self.waiting: AbstractContextManager[None] = nullcontext()
        backend = group_backend(device)
        self.staged = backend in HOST_BACKENDS and device.type != "cpu"
        self._wire = torch.device("cpu") if self.staged else device
        self.waits = None if backend in HOST_BACKENDS else StreamWaits(lambda: self.deadline)
        self.collectives = TorchCollectives(self._started) if collective or self.waits is not None else None
        if self.waits is not None:  # NCCL's first operation must include all ranks, and an exchange need not
            dist.barrier(device_ids=[torch.cuda.current_device() if device.index is None else device.index])

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> "TorchWork":
        """Start all messages of one exchange together, receives first. Raises ExchangeError for an earlier exchange."""
        self._look_back()
        received = [layout_of(message.specs).empty(self._wire) for message in incoming]
        sent = [pack([x.to(self._wire) for x in message.tensors]) for message in outgoing if message.tensors]
        peers = [message.peers for message in outgoing if message.tensors]
        ops = [
            dist.P2POp(dist.irecv, x, message.peer)
            for message, x in zip(incoming, received, strict=True)
            if message.specs
        ]
        ops += [dist.P2POp(dist.isend, x, peer) for x, to in zip(sent, peers, strict=True) for peer in to]
        works = dist.batch_isend_irecv(ops) if ops else []
        return TorchWork(self, works, (sent, received), incoming, where)

    def _started(
        self, work: dist.Work, sent: Tensor, received: Sequence[Tensor], incoming: Sequence[Incoming], where: str
    ) -> "TorchWork":
        """Return the handle of a collective, whose messages come in the buffers `received`, each [elements]."""
        self._look_back()
        return TorchWork(self, [work], ([sent], received), incoming, where)

    def _look_back(self) -> None:
        if self.waits is not None:
            self.waits.look_back()

    def close(self) -> None:
        """Do nothing: whoever initialised the group destroys it."""


class TorchWork(Work[Messages]):
    """Works in flight with their tensors: dropping the handle of a gloo send would block the receiver.

    `buffers`: one flat buffer for each message sent, and one [elements] for each received.
    """

    def __init__(
        self,
        transport: TorchTransport,
        works: Sequence[dist.Work],
        buffers: tuple[Sequence[Tensor], Sequence[Tensor]],
        incoming: Sequence[Incoming],
        where: str,
    ) -> None:
        super().__init__(incoming, where)
        self._transport, self._works = transport, list(works)
        self._sent, self._raw = buffers
        self._missing = partial(_missing, transport.rank, where, incoming)
        self._stalled: tuple[StreamStall, ...] = ()

    def is_here(self, index: int) -> bool:
        """Whether the batch is known to have arrived: with gloo only after a wait."""
        return all(work.is_completed() for work in self._works)

    def _receive(self, index: int) -> list[Tensor]:
        """Receive one message into its buffers. Works may be coalesced, so this waits for the whole batch."""
        self._leave()
        message, device = self.incoming[index], self._transport.device
        into = message.into or [None] * len(message.specs)
        found = layout_of(message.specs).views(self._raw[index])
        return [_into(own, x) if own is not None else x.to(device) for own, x in zip(into, found, strict=True)]

    def _leave(self) -> None:
        """Wait for the batch, both ways."""
        if not self._works:
            return
        try:
            if self._transport.waits is not None:
                self._stalled = (self._transport.waits.wait_for(self._works, self._missing),)
                self._works.clear()
            with self._transport.waiting:
                while self._works:
                    self._works[0].wait(timedelta(seconds=self._transport.deadline))
                    self._works.pop(0)
        except RuntimeError as error:
            raise ExchangeError(f"{self._missing()} within {self._transport.deadline:g} s ({error})") from error
        self._sent = ()

    def _stalls(self) -> Sequence[StreamStall]:
        """With NCCL, the waits of the stream since the last call."""
        found, self._stalled = self._stalled, ()
        return found


def _into(own: Tensor, x: Tensor) -> Tensor:
    """Return `own` with the values of `x`, of the same shape; the backend may have written them there already."""
    return own if own.data_ptr() == x.data_ptr() else own.copy_(x)


def _missing(rank: int, where: str, incoming: Sequence[Incoming]) -> str:
    peers = sorted({message.peer for message in incoming})
    shapes = [spec.shape for message in incoming for spec in message.specs]
    return f"rank {rank} at {where}: no message from ranks {peers} of shapes {shapes}"
