"""Credit instead of queues: a block may begin when one that came out has been taken away."""

import threading

from patchpar.errors import PlanError


class BlockCredits:
    """At most `limit` blocks between their beginning and the hands of whoever watches. For several threads."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise PlanError(f"limit={limit}: at least 1 block has to be under way")
        self.limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Blocks that have begun and have not been taken away."""
        return self._taken

    def take(self) -> bool:
        """Credit for one block; False if there is none."""
        with self._lock:
            has_credit = self._taken < self.limit
            self._taken += has_credit
            return has_credit

    def give_back(self, blocks: int = 1) -> None:
        """So many blocks have been taken away."""
        with self._lock:
            assert self._taken >= blocks, "more credit came back than was given"
            self._taken -= blocks
