"""The secret that ranks on several hosts share: a file that nobody but its owner can read, the same on all hosts."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from patchpar.errors import PlanError

MIN_BYTES, MAX_BYTES = 32, 4096
FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO
MAKE = "`(umask 077; openssl rand -hex 32 > FILE)` makes one"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTrust:
    """What this rank's caller says about other hosts: a secret, or that their network is trusted, or neither.

    `problem`: why the secret cannot be used, so that all ranks can say so and none waits for this one.
    """

    secret: bytes | None = field(default=None, repr=False)
    trusts_network: bool = False
    problem: str = ""

    @classmethod
    def of(cls, secret_file: str | Path | None, *, trusted_network: bool) -> "NetworkTrust":
        """Return what is known of a secret file. Raises nothing for a bad one: see `problem`."""
        if secret_file is None:
            return cls(trusts_network=trusted_network)
        try:
            return cls(secret=read_secret(secret_file))
        except PlanError as error:
            return cls(problem=str(error))

    def check(self) -> None:
        """Raise PlanError if the secret cannot be used."""
        if self.problem:
            raise PlanError(self.problem)


def check_trust(secret_file: object, trusted_network: object) -> tuple[Path | None, bool]:
    """Return the checked arguments of a caller; the file is not read. Raises PlanError."""
    if not isinstance(trusted_network, bool):
        raise PlanError(f"trusted_network={trusted_network!r}: use True or False")
    if secret_file is None:
        return None, trusted_network
    if not isinstance(secret_file, (str, Path)):
        raise PlanError(f"secret_file={secret_file!r}: use the path of a file with a secret, or None")
    if trusted_network:
        raise PlanError("secret_file and trusted_network=True: with a secret the network need not be trusted, use one")
    return Path(secret_file).expanduser().absolute(), False


def read_secret(file: str | Path) -> bytes:
    """Return the secret in a file, without a line end after it.

    Raises PlanError for what is no file of this user, a file that others may read, and a secret that is short or long.
    """
    name = f"secret_file={str(file)!r}"
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe would be waited for
    except OSError as error:
        raise PlanError(f"{name}: {error.strerror}") from error
    try:
        _refuse_others(name, os.fstat(descriptor))
        secret = os.read(descriptor, MAX_BYTES + 1).rstrip(b"\r\n")
    finally:
        os.close(descriptor)
    if not MIN_BYTES <= len(secret) <= MAX_BYTES:
        raise PlanError(
            f"{name}: a secret has {MIN_BYTES} to {MAX_BYTES} bytes, this one has {len(secret)}"
            f"{' or more' if len(secret) > MAX_BYTES else ''}: {MAKE}"
        )
    return secret


def _refuse_others(name: str, found: os.stat_result) -> None:
    """Raise PlanError unless it is a regular file of this user that nobody else can read or change."""
    if not stat.S_ISREG(found.st_mode):
        raise PlanError(f"{name}: it is no regular file; {MAKE}")
    if found.st_uid != os.geteuid():
        raise PlanError(f"{name}: it belongs to user {found.st_uid}, and this process is of user {os.geteuid()}")
    if found.st_mode & FOR_OTHERS:
        raise PlanError(
            f"{name}: its mode {stat.S_IMODE(found.st_mode):04o} lets others than its owner use it: `chmod 600` it"
        )
