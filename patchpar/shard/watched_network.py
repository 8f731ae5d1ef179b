"""Detects changes of a network since it was verified, and knows it again."""

from dataclasses import dataclass

from torch import nn

from patchpar.shard.fingerprint import Fingerprint, fingerprint


@dataclass(frozen=True, slots=True)
class NetworkRecord:
    """A network as it was when it was verified. `moving`: facts (path, name) that the verification itself changed."""

    known: Fingerprint
    moving: frozenset[tuple[str, str]] = frozenset()

    def describes(self, now: Fingerprint) -> bool:
        """Whether a network is as it was then."""
        return not self.known.differences(now) - self.moving


class WatchedNetwork:
    """Detects changes of a network since it was verified.

    Facts that change during the verification itself, such as a counter of calls in a processor, are ignored.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.latest: NetworkRecord | None = None
        """The network when it was last verified."""
        self._moving: frozenset[tuple[str, str]] = frozenset()
        self._is_new = True

    def look(self, *, unsure: bool) -> Fingerprint | None:
        """Return the fingerprint at the first look, or of a network that has changed; else None.

        `unsure`: whether it may have been changed since the last look.
        """
        if not self._is_new and not (unsure and self.has_changed):
            return None
        self._is_new = False
        return self.now()

    def now(self) -> Fingerprint:
        """Return the current fingerprint."""
        return fingerprint(self.network)

    def record(self, before: Fingerprint) -> None:
        """Record the network as verified; `before`: its fingerprint before the verification."""
        known = self.now()
        self.latest = NetworkRecord(known, before.differences(known) | self._moving)

    def forget(self) -> None:
        """Discard the record."""
        self.latest, self._moving = None, frozenset()

    def know_again(self, earlier: NetworkRecord) -> None:
        """Go on with what was known to move in an earlier state, in which the network is again."""
        self.latest, self._moving = None, earlier.moving

    @property
    def has_changed(self) -> bool:
        """Whether the network differs from the record. False without one."""
        return self.latest is not None and not self.latest.describes(self.now())
