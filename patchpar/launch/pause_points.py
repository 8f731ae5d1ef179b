"""Places in a call at which all its ranks can end it together: the caller finds one that none of them has passed.

caller                       ranks
  | -- HOLD ----------------> |     pass no further pause point
  | <------- HELD ----------- |     how many this rank has passed
  | -- HALT ----------------> |     the most of all: go on to that one, and end the call there

A rank that is behind goes on until it has passed as many as the others, which wait for it there. So no rank waits for
a message of one that has ended, and all can take another call as they are. Between two pause points nothing is sent or
checked for it.
"""

import threading
from contextlib import AbstractContextManager

from patchpar.launch.executor import CallAborted


class PausePoints:
    """Those of the current request of one rank. `waiting`: entered while it holds.

    `passes` is called by the main thread, `hold`, `halt` and `release` by the reader thread, also early or late.
    """

    def __init__(self, waiting: AbstractContextManager[None]) -> None:
        self._changed, self._waiting = threading.Condition(), waiting
        self._request, self._passed = 0, 0
        self._most: int | None = None  # passed at most; None: any number
        self._ends = False  # rather than waits there

    def begin(self, request: int) -> None:
        """Begin to count those of a request."""
        with self._changed:
            self._count_for(request)

    def _count_for(self, request: int) -> None:
        if request > self._request:  # else it has been held before it began
            self._request, self._passed, self._most, self._ends = request, 0, None, False

    def passes(self) -> None:
        """Pass one, or wait there while the request is held. Raises CallAborted if the caller has ended it."""
        with self._changed:
            if self._passed == self._most:
                with self._waiting:
                    self._changed.wait_for(lambda: self._passed != self._most or self._ends)
            if self._passed == self._most:
                raise CallAborted("the caller has cancelled the call")
            self._passed += 1

    def hold(self, request: int) -> int:
        """Hold a request at the next one; return how many it has passed."""
        with self._changed:
            self._count_for(request)
            if request == self._request:
                self._most = self._passed
            return self._passed

    def halt(self, request: int, number: int | None) -> None:
        """End a request that has been held when it has passed so many; None lets it go on to its own end."""
        with self._changed:
            if request == self._request:
                self._most, self._ends = number, True
                self._changed.notify_all()

    def release(self, request: int) -> None:
        """End a request that is held at once, since it has failed."""
        with self._changed:  # or the main thread might pass one more meanwhile
            self.halt(request, self._passed)
