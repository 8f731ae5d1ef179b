"""A transport in which messages may be left over is not used again: they would be read as those of a later exchange."""

from patchpar.errors import ExchangeError


class Poisonable:
    """Base of transports. `poison` is called after a failed exchange, and where a call ends between two exchanges."""

    rank: int
    is_poisoned = False
    _reason: str = ""

    def poison(self, reason: str) -> None:
        """Refuse every exchange from now on. Of several reasons the first is kept. Idempotent."""
        self._reason, self.is_poisoned = self._reason or reason, True

    def check(self, where: str) -> None:
        """Raise ExchangeError at the exchange point `where` if this transport is poisoned."""
        if self._reason:
            raise ExchangeError(
                f"rank {self.rank} at {where}: the ranks' connection is not used again, since messages may be left in "
                f"it: {self._reason}. Close the pipeline on all ranks and make it anew"
            )

    def recover(self) -> None:
        """Allow exchanges again: what was left over is lost with the connection it was in."""
        self._reason, self.is_poisoned = "", False
