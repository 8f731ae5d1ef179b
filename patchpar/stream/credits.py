"""Credit instead of queues: a block may begin when one that came out has been taken away."""

import threading

from patchpar.errors import PlanError


class Credits:
    """At most `limit` blocks between their beginning and the hands of whoever watches. For several threads."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise PlanError(f"limit={limit}: at least 1 block has to be under way")
        self.limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    @property
    def in_flight(self) -> int:
        """Blocks that have begun and have not been taken away."""
        return self._taken

    def take(self, timeout: float) -> bool:
        """Credit for one block; False if there is none within `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._taken < self.limit, timeout):
                return False
            self._taken += 1
            return True

    def give_back(self) -> None:
        """One block has been taken away."""
        with self._changed:
            assert self._taken > 0, "more credit came back than was given"
            self._taken -= 1
            self._changed.notify()
