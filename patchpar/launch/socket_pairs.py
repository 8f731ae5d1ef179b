"""How the ranks of one host meet: a socket pair between rank 0 and each other rank, made before they start.

Both ends are inherited, so nothing listens anywhere and no stranger can take a rank's place. Through them rank 0 hands
out further socket pairs, one for every two ranks (see `comm.transport.connect`): who starts N workers need not hold the
N (N - 1) descriptors of all pairs.
"""

from __future__ import annotations

import socket


class SocketPairs:
    """The ends of all pairs in the process that starts the ranks. Each is closed there once its rank has it."""

    def __init__(self, world_size: int) -> None:
        self._ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(world_size)}
        try:
            for rank in range(1, world_size):
                self._ends[0][rank], self._ends[rank][0] = socket.socketpair()
        except OSError:
            self.close()
            raise

    def of(self, rank: int) -> dict[int, int]:
        """The descriptors that a rank is to inherit, by the rank at the other end."""
        return {peer: end.fileno() for peer, end in self._ends[rank].items()}

    def release(self, rank: int) -> None:
        """Close our copies of a rank's ends."""
        for end in self._ends.pop(rank, {}).values():
            end.close()

    def close(self) -> None:
        """Close what is left. Harmless when done twice."""
        for rank in list(self._ends):
            self.release(rank)


def inherited(descriptors: dict[int, int]) -> dict[int, socket.socket]:
    """In a rank: the sockets of what it has inherited. Processes that it starts do not inherit them."""
    links = {peer: socket.socket(fileno=descriptor) for peer, descriptor in descriptors.items()}
    for link in links.values():
        link.set_inheritable(False)
    return links
