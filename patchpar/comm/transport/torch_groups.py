"""Process groups of torch.distributed that belong to one transport: no other user of the default group meets them.

Each has a communicator and, with NCCL, a stream of its own. Of every set of ranks there are two: small messages that
are needed now do not queue behind bulk that is needed in the next step. Theirs is a stream of high priority.

NCCL connects ranks in calls that return when all ranks have made them, however long that takes. Threads make these
calls, and are not waited for beyond the deadline: an abort does not end those in which a communicator is made.

All groups are aborted at once, each by a thread. NCCL first tells the kernels of a communicator to end, and then frees
its memory, for which the driver waits for every kernel of the GPU: also for those of a group that would be next
(pytorch/pytorch#119797). Then it waits until no graph is left with operations of the communicator.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from patchpar.errors import ExchangeError
from patchpar.launch.accelerators import HOST_BACKENDS, current_index, select_device
from patchpar.launch.nccl_failures import NCCL, failures_are_raised, name_in_torch
from patchpar.launch.time_limit import TimedOut, longest_wait, time_limited

T = TypeVar("T")
NCCL_SECONDS = 24 * 3600.0  # at least: torch then ends the process; the deadline of a wait is `StreamWaits`'s
ABORT_SECONDS = 10.0  # that an abort of all groups may take
log = logging.getLogger(__name__)


class ProcessGroups:
    """The groups of `backend`, which wait for `deadline` seconds.

    Collective: all ranks of the default group construct theirs and form groups together.
    """

    def __init__(self, backend: str, device: torch.device, deadline: float) -> None:
        self.backend, self._device, self._deadline = backend, device, deadline
        self._in_streams = backend not in HOST_BACKENDS
        seconds = max(NCCL_SECONDS, longest_wait(deadline)) if self._in_streams else deadline
        self._timeout = timedelta(seconds=seconds)
        self._formed: set[tuple[tuple[int, ...], bool]] = set()
        self._own: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}  # with this rank in it
        self._ending = threading.Lock()  # none is released while the thread of deadlines aborts it

    def form(self, sets: Sequence[tuple[int, ...]], *, with_bulk: bool) -> None:
        """Make the groups of these sets of global ranks, ascending. Every rank has to name the same sets in order.

        Raises ExchangeError where the others do not within the deadline.
        """
        for ranks in sets:
            for bulk in (False, True)[: 1 + with_bulk]:
                if (ranks, bulk) in self._formed:
                    continue
                self._formed.add((ranks, bulk))
                with failures_are_raised():
                    made = self.in_time(partial(self._new, ranks, bulk=bulk), f"the group of ranks {list(ranks)}")
                if made is not None:
                    self._own[ranks, bulk] = made

    def in_time(self, make: Callable[[], T], what: str) -> T:
        """Return what `make` returns. Raises ExchangeError, after the deadline at the latest: gloo has the same."""
        try:
            return within(self._deadline, make, self._device) if self._in_streams else make()
        except ExchangeError:
            raise
        except TimedOut as error:
            raise ExchangeError(
                f"{what} of {self.backend} is not there within {self._deadline:g} s: another rank has not come to it. "
                "All ranks have to use the same plan, at the same time"
            ) from error
        except RuntimeError as error:  # of torch: a store or a socket has waited in vain
            raise ExchangeError(
                f"{what} of {self.backend} cannot be made: {error}. All ranks have to use the same plan, at the "
                "same time"
            ) from error

    def _new(self, ranks: tuple[int, ...], *, bulk: bool) -> Any:
        """Return a new group of `ranks`; None on other ranks."""
        options = urgent_options(self._timeout) if self.backend == NCCL and not bulk else None
        made = dist.new_group(list(ranks), self._timeout, name_in_torch(self.backend), options)
        return made if dist.get_rank() in ranks else None

    def has(self, ranks: tuple[int, ...]) -> bool:
        """Whether there are groups of `ranks`."""
        return (ranks, True) in self._own

    def of(self, ranks: tuple[int, ...], *, bulk: bool) -> dist.ProcessGroup:
        """Return a group of `ranks`, of which this rank is one."""
        return self._own[ranks, bulk]

    def abort(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """End all operations in flight, so that whoever waits for them goes on. The groups cannot be used again.

        `meanwhile`: releases graphs with operations of the groups. Returns after ABORT_SECONDS at the latest.
        """
        with self._ending:
            threads = [
                threading.Thread(target=self._abort, args=(group,), name="patchpar-abort", daemon=True)
                for group in self._members()
            ]
            for thread in threads:
                thread.start()
            meanwhile()
            give_up = time.monotonic() + ABORT_SECONDS
            for thread in threads:
                thread.join(max(0.0, give_up - time.monotonic()))
            left = sum(thread.is_alive() for thread in threads)
            if left:
                log.error(
                    "%d of %d groups of %s have not ended in %g s", left, len(threads), self.backend, ABORT_SECONDS
                )

    def _members(self) -> list[Any]:
        """Return the groups with this rank in them: for the thread of deadlines, while another may form one."""
        return list(self._own.values())

    def _abort(self, group: Any) -> None:
        with contextlib.suppress(RuntimeError, AttributeError):  # gloo's waits have deadlines of their own
            owner = group if hasattr(group, "abort") else group._get_backend(self._device)  # up to torch 2.6
            owner.abort()

    def destroy(self) -> None:
        """Release all groups. Idempotent. Returns after the deadline at the latest; what hangs is left as it is."""
        with self._ending:
            groups = list(self._own.values()) if dist.is_initialized() else []
            self._own.clear()
            release = partial(_release, groups)
            try:
                within(self._deadline, release, self._device) if groups and self._in_streams else release()
            except TimedOut:
                log.error("%d groups of %s have not ended in %g s", len(groups), self.backend, self._deadline)
            except RuntimeError:  # Python begins no thread while it ends
                release()


def _release(groups: Sequence[Any]) -> None:
    for group in groups:
        with contextlib.suppress(RuntimeError, ValueError):  # a peer is gone, or it went with the default group
            dist.destroy_process_group(group)


def within(seconds: float, work: Callable[[], T], device: torch.device) -> T:
    """Return what `work` returns on a thread with the same current `device`. Raises TimedOut, and what it raises."""
    own = f"{device.type}:{current_index(device)}"

    def run() -> T:
        select_device(own)
        return work()

    return time_limited(seconds, run, "patchpar-connect")


def urgent_options(timeout: timedelta) -> Any:
    """Return options of NCCL for a stream of high priority."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # or torch warns that it is not that of the group
    return options
