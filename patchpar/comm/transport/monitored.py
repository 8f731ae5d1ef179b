"""A transport whose waits are seen by who watches its rank from outside, and last as long as that one lets them."""

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from patchpar.comm.transport.message import Transport

T = TypeVar("T", bound=Transport)


class MonitoredRank(Protocol):
    """What has to be known of a rank: `launch.context.RankContext` says what each means."""

    @property
    def wait_limit(self) -> float:
        """Seconds that it may wait for another."""

    @property
    def waiting(self) -> AbstractContextManager[None]:
        """To be entered while it does."""


def watched(transport: T, rank: MonitoredRank) -> T:
    """The same transport, with the limit of `rank` for every wait, showing on it that it waits."""
    transport.deadline, transport.waiting = rank.wait_limit, rank.waiting
    return transport
