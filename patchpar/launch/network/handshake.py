"""How both ends of a new connection prove that they belong to one session, before anything else is read.

    client    token (what it connects to), nonce
    server    nonce, proof
    client    proof
    server    READY, once the connection is in its queue

A proof is HMAC-SHA256 under the key of the session, over role, token and both nonces; the keys of the connection's
messages are, too (as in decision 0028). The session's key is never sent here.
"""

import hmac
import secrets
import socket
import time
from typing import NamedTuple

from patchpar.errors import AuthenticationError

TOKEN_BYTES = NONCE_BYTES = PROOF_BYTES = 32
SERVER, CLIENT = b"patchpar proof of a server\0", b"patchpar proof of a client\0"
TO_SERVER, TO_CLIENT = b"patchpar key to a server\0", b"patchpar key to a client\0"
SESSION = b"patchpar key of ranks on nodes\0"
READY = b"r"
LEAST_SECONDS = 0.01


class ConnectionKeys(NamedTuple):
    """The keys of what this end of a connection sends, and of what it receives."""

    send: bytes
    receive: bytes


def session_key(secret: bytes, nonce: bytes) -> bytes:
    """Return the key of a session whose caller has sampled `nonce`."""
    return hmac.digest(secret, SESSION + nonce, "sha256")


def introduce(link: socket.socket, key: bytes, token: bytes, give_up: float) -> ConnectionKeys:
    """As a client, connect to what `token` names. `give_up`: of time.monotonic().

    Raises AuthenticationError for a server without the key, and OSError.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    send_all(link, token + own, give_up)
    answer = receive_exactly(link, NONCE_BYTES + PROOF_BYTES, give_up)
    facts = token + own + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], hmac.digest(key, SERVER + facts, "sha256")):
        raise AuthenticationError(
            "the process that answers there did not prove to have the key of this session: another content of "
            "secret_file there, or somebody else has answered. Copy the same file to all nodes"
        )
    send_all(link, hmac.digest(key, CLIENT + facts, "sha256"), give_up)
    if receive_exactly(link, len(READY), give_up) != READY:
        raise ConnectionResetError("the other end has sent something else before it was ready")
    return _keys(key, facts, is_client=True)


def admit(link: socket.socket, key: bytes, give_up: float) -> tuple[bytes, ConnectionKeys]:
    """As a server, return what a client wants to connect to. READY is still to be sent.

    Raises AuthenticationError for a client without the key, and OSError.
    """
    asked = receive_exactly(link, TOKEN_BYTES + NONCE_BYTES, give_up)
    own = secrets.token_bytes(NONCE_BYTES)
    facts = asked + own
    send_all(link, own + hmac.digest(key, SERVER + facts, "sha256"), give_up)
    proof = receive_exactly(link, PROOF_BYTES, give_up)
    if not hmac.compare_digest(proof, hmac.digest(key, CLIENT + facts, "sha256")):
        raise AuthenticationError("a process without the key of this session has connected, and was refused")
    return asked[:TOKEN_BYTES], _keys(key, facts, is_client=False)


def _keys(key: bytes, facts: bytes, *, is_client: bool) -> ConnectionKeys:
    to_server, to_client = (hmac.digest(key, label + facts, "sha256") for label in (TO_SERVER, TO_CLIENT))
    return ConnectionKeys(to_server, to_client) if is_client else ConnectionKeys(to_client, to_server)


def send_all(link: socket.socket, data: bytes, give_up: float) -> None:
    """Send a few bytes. Raises OSError, a TimeoutError at `give_up`."""
    link.settimeout(max(LEAST_SECONDS, give_up - time.monotonic()))
    link.sendall(data)


def receive_exactly(link: socket.socket, num_bytes: int, give_up: float) -> bytes:
    """Return so many bytes. Raises OSError, a TimeoutError at `give_up`."""
    data = b""
    while len(data) < num_bytes:
        if (left := give_up - time.monotonic()) <= 0:
            raise TimeoutError("the other end has not answered in time")
        link.settimeout(left)
        more = link.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("it has closed the connection")
        data += more
    return data
