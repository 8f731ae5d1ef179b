"""What the caller needs of the process of a rank, wherever it runs, and of what starts such processes."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from patchpar.launch.channel import Channel
from patchpar.launch.handshake import GroupStore
from patchpar.launch.hang_detection import RankActivity
from patchpar.launch.worker_output import FirstPrinter


class ActivitySource(Protocol):
    """Where the caller reads what a rank does. Reading never blocks."""

    @property
    def sign(self) -> RankActivity:
        """The rank's activity, as far as it is known."""

    @property
    def where(self) -> str:
        """The text of the last heartbeat; empty before the first."""

    def has_begun(self, request: int) -> bool:
        """Return whether the rank has begun this request, as far as can be known: if not, it has not."""


class RankProcess(Protocol):
    """The process of one rank."""

    @property
    def rank(self) -> int:
        """The rank."""

    @property
    def channel(self) -> Channel:
        """The caller's end of the connection with it."""

    @property
    def heartbeat(self) -> ActivitySource:
        """What it does."""

    def wait_for_pid(self, give_up: float) -> int:
        """Return the process id, on its own host. Raises LaunchError if it does not exist by `give_up`."""

    def is_alive(self) -> bool:
        """Return whether the process is running."""

    def last_exchange_point(self) -> str:
        """Return the last exchange point that it reached, for error messages."""

    def last_output(self) -> str:
        """Return the last lines that it printed, with a heading; empty if there are none, or they are elsewhere."""

    def dump_stack(self) -> None:
        """Make it print the stack of its main thread, if it can."""

    def how_it_ended(self) -> str:
        """Return how it has ended, as text."""

    def ask_to_stop(self) -> None:
        """Send a STOP frame."""

    def terminate(self) -> None:
        """Ask the system to end it."""

    def kill(self) -> None:
        """End it; does not wait."""

    def wait(self, give_up: float) -> bool:
        """Wait until it has ended or it is `give_up`; return whether it has."""

    def after_fork(self) -> None:
        """In a forked child of the caller: close copied descriptors."""

    def release(self) -> None:
        """Close all descriptors of a process that has ended. Idempotent."""


class ProcessStarter(Protocol):
    """Starts the processes of a pool's ranks, and connects them with each other."""

    def start(self, ranks: Sequence[int], store: GroupStore | None, speakers: FirstPrinter) -> Iterator[RankProcess]:
        """Start processes one after another, and send each its WorkerConfig. Raises LaunchError.

        `store`: where they meet, if they have a default group. `speakers`: which rank printed a line first.
        """

    def link(self, one: RankProcess, other: RankProcess) -> None:
        """Give two ranks a link in place of an earlier one."""
