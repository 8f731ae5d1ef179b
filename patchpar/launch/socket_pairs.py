"""Socket pairs between rank 0 and each other rank of one host, created before the ranks start.

Both ends are inherited, so that no port is opened and no other process can connect. Through them rank 0 passes on
further socket pairs, one for every two ranks (see `comm.transport.connect`), so that the process that starts N workers
does not need N (N - 1) descriptors.
"""

import socket


class SocketPairs:
    """The ends of all pairs in the starting process, which closes each one after its rank has inherited it."""

    def __init__(self, world_size: int) -> None:
        self._ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(world_size)}
        try:
            for rank in range(1, world_size):
                self._ends[0][rank], self._ends[rank][0] = socket.socketpair()
        except OSError:
            self.close()
            raise

    def of(self, rank: int) -> dict[int, int]:
        """Return the descriptors for a rank to inherit, by the rank at the other end."""
        return {peer: end.fileno() for peer, end in self._ends[rank].items()}

    def release(self, rank: int) -> None:
        """Close this process's copies of a rank's ends."""
        for end in self._ends.pop(rank, {}).values():
            end.close()

    def close(self) -> None:
        """Close all remaining ends. Idempotent."""
        for rank in list(self._ends):
            self.release(rank)


def inherited(descriptors: dict[int, int]) -> dict[int, socket.socket]:
    """Return sockets for inherited descriptors, in a rank. Processes that it starts do not inherit them."""
    links = {peer: socket.socket(fileno=descriptor) for peer, descriptor in descriptors.items()}
    for link in links.values():
        link.set_inheritable(False)
    return links
