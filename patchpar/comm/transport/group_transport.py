"""What transports over process groups have in common: how operations begin, are awaited, and end after a failure."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from patchpar.comm.transport.message import Incoming, StreamWaitingFlag, T
from patchpar.comm.transport.poison import Poisonable
from patchpar.comm.transport.stream_waits import StreamWaits
from patchpar.comm.transport.torch_collectives import Begin, Buffers, Handle, TorchCollectives
from patchpar.comm.transport.torch_groups import ProcessGroups
from patchpar.comm.transport.torch_work import TorchWork
from patchpar.errors import ExchangeError


class GroupTransport(Poisonable):
    """Base of transports over process groups. `deadline`: seconds of one wait.

    `waits`: see `StreamWaits`; None where a wait blocks the process.
    """

    device: torch.device
    deadline: float
    waiting: AbstractContextManager[None]
    waits: StreamWaits | None
    collectives: TorchCollectives | None
    _groups: ProcessGroups

    def _start(
        self, handle: Handle[T], begin: Begin, buffers: Buffers, incoming: Sequence[Incoming], where: str
    ) -> TorchWork[T]:
        """Begin operations whose messages come in `buffers`, and return their handle. Raises ExchangeError.

        While a graph is captured, what the backend refuses is raised as it is: see `StreamWaits.are_captured`.
        """
        if self.is_poisoned:
            self.check(where)
        waits = self.waits
        if waits is not None:
            waits.begun = time.monotonic(), self.rank, where
            if not waits.has_news:
                waits.wake_watch()
        try:
            return handle(self, begin(), buffers, incoming, where)
        except RuntimeError as error:  # of torch: a peer is gone, or the group was aborted
            if self.is_captured:
                raise
            late = "" if waits is None else waits.late
            text = late or f"rank {self.rank} at {where}: cannot exchange messages ({error})"
            self.poison(text)
            raise ExchangeError(text) from error
        finally:
            if waits is not None:
                waits.begun = None

    @property
    def is_captured(self) -> bool:
        """Whether a graph is captured now: see `StreamWaits.are_captured`."""
        return self.waits is not None and self.waits.are_captured

    def _report_wait(self, waits: bool) -> None:
        if isinstance(self.waiting, StreamWaitingFlag):
            self.waiting.set_stream_waiting(waits)

    def settle(self, where: str) -> None:
        """Block until every message waited for has arrived. Raises ExchangeError."""
        if self.waits is not None:
            self.waits.settle()
        self.check(where)

    def poison(self, reason: str) -> None:
        """See `Poisonable`. Operations in flight end, so that a GPU that waits for them goes on."""
        super().poison(reason)
        if self.collectives is not None:
            self.collectives.abort()
        self._groups.abort(self._release_graphs)

    def _release_graphs(self) -> None:
        """Release graphs with messages of this transport in them: NCCL ends no communicator that one refers to."""
        if self.waits is not None:
            self.waits.release_graphs()
