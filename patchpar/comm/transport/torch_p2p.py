"""Messages through torch.distributed: NCCL between GPUs, gloo between hosts. One operation for each message."""

import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as TimedOut
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from patchpar.comm.transport.group_transport import GroupTransport
from patchpar.comm.transport.message import Incoming, Messages, Outgoing
from patchpar.comm.transport.packing import layout_of, pack
from patchpar.comm.transport.stream_waits import StreamWaits
from patchpar.comm.transport.torch_collectives import Begin, TorchCollectives
from patchpar.comm.transport.torch_groups import ProcessGroups, within
from patchpar.comm.transport.torch_work import TorchWork
from patchpar.errors import ExchangeError
from patchpar.launch.accelerators import HOST_BACKENDS, current_index, group_backend, select_device

POLL = 1e-3
FIRST = "the first operation of all ranks"
ADVICE = (
    "With NCCL_DEBUG=INFO in the environment NCCL says more. Frequent causes: a container with little shared memory "
    "(docker run --ipc=host), GPUs that cannot reach each other's memory though the driver says so (NCCL_P2P_DISABLE=1)"
)


class TorchTransport(GroupTransport):
    """Messages in process groups of its own. Gloo carries CPU tensors only, so others are copied to the CPU.

    A wait takes at most `deadline` seconds. With NCCL the GPU's stream waits: see `StreamWaits`. `collectives` are used
    with NCCL, or if `collective` says so.
    Collective: all ranks of torch.distributed's default group construct theirs together. Raises ExchangeError.
    """

    def __init__(self, device: torch.device, deadline: float, *, collective: bool = False) -> None:
        self.rank, self.device, self.deadline = dist.get_rank(), device, deadline
        self.waiting: AbstractContextManager[None] = nullcontext()
        backend = group_backend(device)
        self.staged = backend in HOST_BACKENDS and device.type != "cpu"
        self._wire = torch.device("cpu") if self.staged else device
        self.waits = None if backend in HOST_BACKENDS else self._waits_on(device)
        all_ranks = tuple(range(dist.get_world_size()))
        self._groups = ProcessGroups(backend, self._wire, deadline)
        collective = collective or self.waits is not None
        self._groups.form([all_ranks], with_bulk=collective)
        self._group = self._groups.of(all_ranks, bulk=False)
        self.collectives = TorchCollectives(self._groups, self._wire, self._start) if collective else None
        if self.waits is not None:  # NCCL's first operation must include all ranks, and an exchange need not
            self._meet()

    def _waits_on(self, device: torch.device) -> StreamWaits:
        on_thread = partial(select_device, str(device))
        return StreamWaits(device.type, lambda: self.deadline, self.poison, self._report_wait, lambda: False, on_thread)

    def _meet(self) -> None:
        """Wait for all ranks in their first operation, in which NCCL connects. Raises ExchangeError after the deadline.

        torch's own limit is that of the group, after which it ends the process.
        """
        cause: Exception | None = None
        failure = f"it is not over within {self.deadline:g} s"
        try:
            within(self.deadline, partial(self._barrier, current_index(self.device)), self.device)
            return
        except TimedOut as error:
            cause = error
        except RuntimeError as error:
            cause, failure = error, str(error)
        text = f"rank {self.rank} at {FIRST}: {failure}. {ADVICE}"
        self.poison(text)
        raise ExchangeError(text) from cause

    def _barrier(self, device: int) -> None:
        """Return when all ranks are here. Raises RuntimeError, of torch. It blocks where a rank is missing."""
        give_up = time.monotonic() + self.deadline
        work = dist.barrier(self._group, async_op=True, device_ids=[device])
        while not work.is_completed():
            if time.monotonic() > give_up:
                raise TimedOut
            time.sleep(POLL)
        work.wait()

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> TorchWork[Messages]:
        """Start all messages of one exchange together, receives first. Raises ExchangeError for an earlier exchange."""
        received = [layout_of(message.specs).empty(self._wire) for message in incoming]
        sent = [pack([x.to(self._wire) for x in message.tensors]) for message in outgoing if message.tensors]
        peers = [message.peers for message in outgoing if message.tensors]
        ops = [
            dist.P2POp(dist.irecv, x, message.peer, self._group)
            for message, x in zip(incoming, received, strict=True)
            if message.specs
        ]
        ops += [dist.P2POp(dist.isend, x, peer, self._group) for x, to in zip(sent, peers, strict=True) for peer in to]
        begin: Begin = partial(dist.batch_isend_irecv, ops) if ops else list
        return self._start(TorchWork, begin, (sent, received), incoming, where)

    def close(self) -> None:
        """Release the groups. The default group stays: whoever initialised it destroys it. Idempotent."""
        if self.waits is not None:
            self.waits.close()
            if self.waits.late:  # what noticed that may not have come to the abort, without which operations never end
                self._groups.abort(self._release_graphs)
        self._release_graphs()
        self._groups.destroy()
