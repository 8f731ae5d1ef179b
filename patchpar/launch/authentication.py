"""How ranks on several hosts know one another, before anything that another has sent is unpickled.

    greeting    of each rank: its host, what its caller has said about the network, a fresh nonce; JSON, to all
    proof       of each rank: HMAC-SHA256 under the secret, over its number and all greetings, to all
    key         HMAC-SHA256 under the secret, over all greetings: of this session's messages, see `message_seal`

Every rank has put a nonce of its own into what all of them prove, so that no old proof, and no message of an old
session, is valid again. The secret is never sent; but who records proofs can try secrets until one fits, so it has to
be random and long.
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from patchpar.errors import LaunchError
from patchpar.launch.control_group import Control
from patchpar.launch.message_seal import MessageSeal
from patchpar.launch.rendezvous import this_host
from patchpar.launch.shared_secret import NetworkTrust

NONCE_BYTES = 32
PROOF, KEY = b"patchpar proof of a rank\0", b"patchpar key of a session\0"
PAIR = struct.Struct("<II")  # a number and a count or length
NO_GREETING = "rank {} does not greet as patchpar does: use the same version everywhere"
HOWTO = "see 'Several machines' in the documentation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What a rank says first. `host`: see `this_host`. `name`: of its host, for people."""

    host: str
    name: str
    has_secret: bool
    trusts_network: bool
    problem: str
    nonce: str

    @classmethod
    def of(cls, trust: NetworkTrust) -> "Greeting":
        """Return this rank's greeting, with a fresh nonce."""
        return cls(
            host=this_host(),
            name=socket.gethostname(),
            has_secret=trust.secret is not None,
            trusts_network=trust.trusts_network,
            problem=trust.problem,
            nonce=secrets.token_hex(NONCE_BYTES),
        )

    @classmethod
    def read(cls, rank: int, data: bytes) -> "Greeting":
        """Return the greeting of another rank. Raises LaunchError for anything else."""
        try:
            found = json.loads(data)
            greeting = cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError) as error:
            raise LaunchError(NO_GREETING.format(rank)) from error
        texts = (greeting.host, greeting.name, greeting.problem, greeting.nonce)
        flags = (greeting.has_secret, greeting.trusts_network)
        if not (all(type(text) is str for text in texts) and all(type(flag) is bool for flag in flags)):
            raise LaunchError(NO_GREETING.format(rank))
        return greeting

    def as_bytes(self) -> bytes:
        """Return the message to the other ranks."""
        return json.dumps(asdict(self)).encode()


class Greetings:
    """The greetings of all ranks, as rank `rank`, this one, has received them.

    `deadline`: seconds. Collective. Raises LaunchError, and WorkerError where a rank does not answer.
    """

    def __init__(self, control: Control, trust: NetworkTrust, rank: int, deadline: float) -> None:
        self._control, self._trust, self._rank, self._deadline = control, trust, rank, deadline
        own = Greeting.of(trust).as_bytes()
        messages = control.gather(own, deadline)
        messages[rank] = own  # whatever has come back: a session without this rank's new nonce may be an old one
        self.all = [Greeting.read(other, message) for other, message in enumerate(messages)]
        self.digest = _digest_of(messages)
        """SHA-256 of all greetings, equal on all ranks if they have received the same."""

    def check(self) -> None:
        """Raise PlanError or LaunchError for a secret file that a rank cannot use."""
        self._trust.check()
        for rank, greeting in enumerate(self.all):
            if greeting.problem:
                raise LaunchError(f"{self._named(rank)} cannot use its secret: {greeting.problem}")

    @property
    def are_of_one_host(self) -> bool:
        """Whether all ranks run as one user on one host, where the kernel knows who is who."""
        hosts = {greeting.host for greeting in self.all}
        return len(hosts) == 1 and hosts != {""}

    def authenticate(self) -> MessageSeal | None:
        """Return the seal of a session of ranks that all have the secret; None where all callers trust the network.

        Collective. Raises LaunchError if not all ranks have said the same of it, or a rank does not have the secret.
        """
        self._refuse_disagreement()
        secret = self._trust.secret
        if secret is None:
            return None
        proofs = self._control.gather(self._proof(secret, self._rank), self._deadline)
        wrong = [
            rank
            for rank, proof in enumerate(proofs)
            if rank != self._rank and not hmac.compare_digest(proof, self._proof(secret, rank))
        ]
        if wrong:
            raise LaunchError(
                f"{' and '.join(map(self._named, wrong))} did not prove to have the secret of "
                f"{self._named(self._rank)}: another content of secret_file there, or somebody else has answered. "
                "Copy the same file to all hosts, and start the job again"
            )
        return MessageSeal(hmac.digest(secret, KEY + self.digest, "sha256"), self._rank)

    def _proof(self, secret: bytes, rank: int) -> bytes:
        return hmac.digest(secret, PROOF + PAIR.pack(rank, len(self.all)) + self.digest, "sha256")

    def _refuse_disagreement(self) -> None:
        """Raise LaunchError unless all have a secret, or all trust the network."""
        having = [rank for rank, greeting in enumerate(self.all) if greeting.has_secret]
        lacking = [rank for rank in range(len(self.all)) if rank not in having]
        if having and lacking:
            raise LaunchError(
                f"{self._named(having[0])} has a secret_file and {self._named(lacking[0])} has none: pass the same on "
                "all ranks"
            )
        wary = [rank for rank in lacking if not self.all[rank].trusts_network]
        if wary:
            names = ", ".join(sorted({greeting.name for greeting in self.all}))
            raise LaunchError(
                f"the ranks are not known to run on one Linux host ({names}), where they would unpickle, and so run, "
                "whatever is sent to them over the network. Pass secret_file= on all ranks, a file that all hosts have "
                f"and nobody else (--secret-file; {HOWTO}); or trusted_network=True (--trusted-network) where nobody "
                f"else can reach the network. {self._named(wary[0])} has neither"
            )

    def _named(self, rank: int) -> str:
        return f"rank {rank} (on {self.all[rank].name})"


def _digest_of(messages: Sequence[bytes]) -> bytes:
    code = hashlib.sha256()
    for rank, message in enumerate(messages):
        code.update(PAIR.pack(rank, len(message)) + message)
    return code.digest()
