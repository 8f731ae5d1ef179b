"""The link between two ranks that have a listener each: every line is a connection from the lower to the higher one."""

import socket

from patchpar.errors import AuthenticationError
from patchpar.launch.links import RankLink
from patchpar.launch.network.listener import RankListener
from patchpar.launch.network.tagged_socket import RankAddress, connect_to


class NetworkLink(RankLink):
    """The link of `rank` to `peer`, which listens at `address`. `token`: of this link only, the same on both.

    `own`: the listener of this rank. `key`: of the session.
    """

    def __init__(self, rank: int, peer: int, own: RankListener, address: RankAddress, key: bytes, token: bytes) -> None:
        super().__init__(rank, peer)
        self._own, self._address, self._key, self._token = own, address, key, token

    def offer(self, give_up: float) -> socket.socket:
        """See RankLink."""
        self._check()
        try:
            return self._known(connect_to(self._address, self._own.address.node, self._key, self._token, give_up))
        except AuthenticationError as error:
            raise ConnectionRefusedError(str(error)) from error

    def accept(self, give_up: float) -> socket.socket:
        """See RankLink."""
        self._check()
        return self._known(self._own.take(self._token, give_up, lambda: self._is_shut))

    def shut(self) -> None:
        """See RankLink."""
        super().shut()
        self._own.forget(self._token)

    def close(self) -> None:
        """See RankLink."""
        self.shut()
