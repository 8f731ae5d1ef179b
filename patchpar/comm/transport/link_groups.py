"""Process groups of a few ranks each that belong to no default group of torch.distributed.

They can be made anew: ranks that go on after another one has died meet its successor in new groups.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from patchpar.comm.transport.torch_groups import ProcessGroups, urgent_options
from patchpar.launch.anonymous_file import anonymous_file
from patchpar.launch.nccl_failures import NCCL, failures_are_raised

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Pair = tuple[int, int]
"""Sender and receiver, as global ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """One rank of a group. `ranks` are global, `index` is its position in them. `timeout`: torch's, see GroupRank."""

    backend: str
    label: str
    ranks: tuple[int, ...]
    index: int
    timeout: timedelta
    urgent: bool


class RendezvousFiles:
    """The files at which groups have met: this rank's own, and those of other ranks.

    They have no names, and stay open as long as this process lives: torch's stores open them again at any time, also
    when they are deleted.
    """

    def __init__(self) -> None:
        self._own: int | None = None
        self._stores: dict[tuple[str, int], Store] = {}

    @property
    def own(self) -> str:
        """The path of this rank's file, for processes of this host."""
        if self._own is None:
            self._own = anonymous_file("patchpar-links")
        return f"/proc/{os.getpid()}/fd/{self._own}"

    def store(self, path: str, generation: int, seconds: float) -> "Store":
        """Return the store of one generation of groups in the file `path`. `seconds`: limit of a wait in it.

        Raises OSError.
        """
        known = path, Path(path).stat().st_ino
        if known not in self._stores:
            descriptor = os.open(path, os.O_RDWR)
            self._stores[known] = dist.FileStore(f"/proc/self/fd/{descriptor}", -1)  # type: ignore[attr-defined]
        self._stores[known].set_timeout(timedelta(seconds=seconds))
        return dist.PrefixStore(str(generation), self._stores[known])  # type: ignore[attr-defined]


def standalone_group(store: "Store", own: GroupMember) -> Any:
    """Return a group whose ranks meet at `store`. Collective of its ranks. Raises RuntimeError, of torch."""
    at = dist.PrefixStore(own.label, store)  # type: ignore[attr-defined]
    if own.backend == NCCL:
        options = urgent_options(own.timeout) if own.urgent else dist.ProcessGroupNCCL.Options()
        options._timeout = own.timeout
        return dist.ProcessGroupNCCL(at, own.index, len(own.ranks), options)
    return dist.ProcessGroupGloo(at, own.index, len(own.ranks), own.timeout)


class LinkGroups(ProcessGroups):
    """Groups of sets of ranks, and one for each direction of the links of rank `rank`: `links`.

    `deadline`: seconds that gloo waits.
    """

    def __init__(self, backend: str, device: torch.device, rank: int, deadline: float) -> None:
        super().__init__(backend, device, deadline)
        self._rank = rank
        self._store: Store | None = None
        self.links: dict[Pair, Any] = {}

    def renew(self, store: "Store", pairs: Sequence[Pair], sets: Sequence[tuple[int, ...]]) -> None:
        """Make all groups anew. Collective: all ranks name the same, in the same order. Raises RuntimeError."""
        self.destroy()
        self._store = store
        with failures_are_raised():
            for pair in pairs:
                if self._rank in pair:
                    self.links[pair] = self._member_of(f"from {pair[0]} to {pair[1]}", pair, urgent=True)
        self.form(sets, with_bulk=True)

    def _new(self, ranks: tuple[int, ...], *, bulk: bool) -> Any:
        label = f"{'bulk of' if bulk else 'all of'} {ranks}"
        return self._member_of(label, ranks, urgent=not bulk) if self._rank in ranks else None

    def _member_of(self, label: str, ranks: tuple[int, ...], *, urgent: bool) -> Any:
        assert self._store is not None, "groups are made by `renew`"
        own = GroupMember(
            backend=self.backend,
            label=label,
            ranks=ranks,
            index=ranks.index(self._rank),
            timeout=self._timeout,
            urgent=urgent,
        )
        return standalone_group(self._store, own)

    def _members(self) -> list[Any]:
        """See ProcessGroups."""
        return [*list(self.links.values()), *super()._members()]

    def destroy(self) -> None:
        """Release all groups, without waiting for ranks that may be gone. Idempotent."""
        self.abort()
        self.links.clear()
        self._own.clear()
        self._formed.clear()
