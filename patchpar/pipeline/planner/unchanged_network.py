"""The fingerprint of a network that is only recorded: nobody changes it, so that it is read once for all recordings."""

from torch import nn

from patchpar.shard.fingerprint import Fingerprint, fingerprint
from patchpar.shard.watched_network import WatchedNetwork


class UnchangedNetwork(WatchedNetwork):
    """A network with the same fingerprint at every look. `read`: those that were read, by network."""

    def __init__(self, network: nn.Module, read: dict[nn.Module, Fingerprint]) -> None:
        super().__init__(network)
        self._read = read

    def now(self) -> Fingerprint:
        """See WatchedNetwork."""
        if self.network not in self._read:
            self._read[self.network] = fingerprint(self.network)
        return self._read[self.network]
