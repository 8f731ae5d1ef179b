"""API keys of a server, compared in constant time."""

import hmac
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from patchpar.errors import PlanError

MIN_CHARACTERS = 16
SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """SHA-256 digests of the keys that a server accepts. Without any, it accepts every request."""

    digests: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, *keys: str) -> "ApiKeys":
        """Keep digests of `keys`."""
        return cls(tuple(sha256(key.encode()).digest() for key in keys))

    @classmethod
    def read(cls, path: Path, flag: str = "--api-key-file") -> "ApiKeys":
        """Read the file of an option `flag`, a key on each line; empty lines and those that begin with # do not count.

        Raises PlanError for a file that cannot be read or has no key, and a key that is short or has blanks in it.
        """
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text file"
            raise PlanError(f"{flag} {path}: {reason}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise PlanError(f"{flag} {path}: there is no key in it; write one on a line of its own")
        for number, key in enumerate(keys, 1):
            if len(key) < MIN_CHARACTERS or len(key.split()) > 1:
                raise PlanError(
                    f"{flag} {path}: key {number} must have at least {MIN_CHARACTERS} characters and no "
                    "blanks; `openssl rand -hex 24` makes one"
                )
        return cls.of(*keys)

    def __bool__(self) -> bool:
        return bool(self.digests)

    def accept(self, authorization: bytes) -> bool:
        """Return whether the value of an Authorization header, "Bearer KEY", has one of the keys.

        All keys are compared whatever the result, and digests are of one length: time shows neither key nor length.
        """
        scheme, _, key = authorization.partition(b" ")
        given = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self.digests]
        return not self.digests or (any(matches) and scheme.lower() == SCHEME.encode())
