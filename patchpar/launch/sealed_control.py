"""A Control whose messages are authenticated: for ranks on several hosts, over any other Control."""

from patchpar.errors import AuthenticationError
from patchpar.launch.control_group import Control
from patchpar.launch.message_seal import MessageSeal

BROADCAST, GATHER = "broadcast", "gather"


class SealedControl(Control):
    """Seals what this rank sends through `inner`, and opens what it receives. Both methods raise AuthenticationError.

    After a gather that it refuses this rank leaves, since it cannot tell the others: so they do not wait for it.
    """

    def __init__(self, inner: Control, seal: MessageSeal) -> None:
        self._inner, self._seal = inner, seal

    def broadcast(self, data: bytes) -> bytes:
        if self._seal.rank == 0:
            self._inner.broadcast(self._seal.seal(BROADCAST, data))
            return data
        return self._seal.open(BROADCAST, 0, self._inner.broadcast(b""))

    def gather(self, data: bytes, patience: float) -> list[bytes]:
        try:
            return self._seal.gathered(GATHER, data, lambda own: self._inner.gather(own, patience))
        except AuthenticationError:
            self.leave()
            raise

    def leave(self) -> None:
        self._inner.leave()
