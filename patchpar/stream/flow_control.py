"""Credit-based flow control: a block may begin when the consumer has taken an earlier one."""

import threading

from patchpar.errors import PlanError


class BlockCredits:
    """At most `limit` blocks that have begun and have not been taken. Thread-safe. Raises PlanError."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise PlanError(f"limit={limit}: it must be at least 1 block")
        self.limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Blocks that have begun and have not been taken."""
        return self._taken

    def take(self) -> bool:
        """Take credit for one block; False if there is none."""
        with self._lock:
            has_credit = self._taken < self.limit
            self._taken += has_credit
            return has_credit

    def give_back(self, blocks: int = 1) -> None:
        """Return the credit of `blocks` blocks that the consumer has taken."""
        with self._lock:
            assert self._taken >= blocks, "more credit is returned than was taken"
            self._taken -= blocks
