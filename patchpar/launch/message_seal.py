"""Authentication of messages between ranks: HMAC-SHA256 over purpose, sender, sequence number and content.

    tag     32 bytes, under the key of this session
    data    the message as it would be without

A message that was changed, repeated, left out, sent by another rank or meant for something else is refused before it
is read. It is not encrypted.
"""

import hmac
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Sequence

from patchpar.errors import AuthenticationError

TAG_BYTES = 32
FACTS = struct.Struct("<IQI")  # sender, sequence number, length of the purpose in bytes


def new_key() -> bytes:
    """Return a key for the ranks of a new session that can share it in private."""
    return secrets.token_bytes(TAG_BYTES)


class MessageSeal:
    """One rank's end of a session. `key`: the same on all ranks, never used before. `rank`: this one.

    Messages of one purpose arrive in the order in which they were sealed; all ranks name purposes alike.
    """

    def __init__(self, key: bytes, rank: int) -> None:
        self._key, self.rank = key, rank
        self._sealed = Counter[str]()
        self._opened = Counter[tuple[str, int]]()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of rank {self.rank}>"  # without the key

    def seal(self, purpose: str, data: bytes) -> bytes:
        """Return the next message of a purpose, with its tag."""
        self._sealed[purpose] += 1
        return self._tag(purpose, self.rank, self._sealed[purpose], data) + data

    def open(self, purpose: str, sender: int, message: bytes) -> bytes:
        """Return the content of the next message of rank `sender`. Raises AuthenticationError if it is not that."""
        self._opened[purpose, sender] += 1
        tag, data = message[:TAG_BYTES], message[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(purpose, sender, self._opened[purpose, sender], data)):
            raise AuthenticationError(
                f"rank {self.rank} has refused a message ({purpose}) that rank {sender} should have sent: it was "
                "changed or repeated on the way, or somebody else has sent it. Nothing of it was read. Create the "
                "pipeline again on all ranks, on a network that only they can reach"
            )
        return data

    def gathered(
        self, purpose: str, own: bytes, gather: Callable[[bytes], Sequence[bytes]], ranks: Sequence[int] | None = None
    ) -> list[bytes]:
        """Return the content of the messages of all `ranks` (None: of all there are) that `gather` returns in order.

        `gather` gets this rank's message, with its tag. Raises AuthenticationError.
        """
        messages = gather(self.seal(purpose, own))
        return [
            own if rank == self.rank else self.open(purpose, rank, message)
            for rank, message in zip(range(len(messages)) if ranks is None else ranks, messages, strict=True)
        ]

    def _tag(self, purpose: str, sender: int, number: int, data: bytes) -> bytes:
        text = purpose.encode()
        code = hmac.new(self._key, FACTS.pack(sender, number, len(text)) + text, "sha256")
        code.update(data)
        return code.digest()
