"""Cache of verification results, so that each denoiser is compared with its plain forward once.

A result holds for one denoiser class, config and fingerprint, strategy, number of bands, dtype, set of arguments and
set of versions. Each is one small JSON file in the user's cache folder.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from patchpar.plan.json_files import read_object

log = logging.getLogger(__name__)
T = TypeVar("T")
PACKAGES = ("patchpar", "torch", "diffusers")
NOWHERE = Path(os.devnull)  # no file can be made below it


@dataclass(frozen=True, slots=True)
class VerificationCache:
    """Verification results in `folder`.

    `trusted`: names of modules and packages whose code in a network is verified once, at the first call.
    """

    folder: Path
    _: KW_ONLY
    trusted: frozenset[str] = frozenset()

    @classmethod
    def in_home(cls, name: str = "verified") -> "VerificationCache":
        """Return this user's cache of that name. A user without a home folder, as in containers, stores nothing."""
        try:
            home = Path.home()
        except RuntimeError:
            home = NOWHERE
        return cls(home / ".cache" / "patchpar" / name)

    @classmethod
    def of(cls, verify: bool | Path, trusted: Iterable[str] = ()) -> "VerificationCache | None":
        """Return the cache for the option `verify`: in a folder, this user's (True), or none (False)."""
        if verify is False:
            return None
        folder = verify if isinstance(verify, Path) else cls.in_home().folder
        return cls(folder, trusted=frozenset(trusted))

    def key(self, facts: Mapping[str, Any]) -> str:
        """Return a name for a set of facts and the versions of patchpar, torch and diffusers."""
        text = json.dumps({**facts, "versions": versions()}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def find(self, key: str, what: str, read: Callable[[Any], T]) -> T | None:
        """Return the stored entry `what`, such as "relative_error", parsed by `read`; None if missing or invalid."""
        file = self.folder / f"{key}.json"
        is_there = False
        with contextlib.suppress(OSError):  # a folder that may not be looked into
            is_there = file.is_file()
        if not is_there:
            return None
        try:
            return read(read_object(file)[what])
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            log.warning("%s is not what was written there, and is ignored: %s", file, f"{error!r:.200}")
            return None

    def remember(self, key: str, facts: Mapping[str, Any], **found: Any) -> None:
        """Store a result. If the folder cannot be written, the next process verifies again."""
        with contextlib.suppress(OSError):
            self.store(key, facts, **found)

    def store(self, key: str, facts: Mapping[str, Any], **found: Any) -> None:
        """Store a result. Raises OSError if the folder cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{key}.json"
        draft = file.with_suffix(f".{os.getpid()}-{threading.get_native_id()}")  # ranks may write it at once
        try:
            draft.write_text(json.dumps({**facts, **found}, indent=1, default=str))
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)  # as on a full disk


@cache
def versions() -> dict[str, str]:
    """Return the versions of what results depend on, by package; "unknown" for one that is not installed."""
    return {name: version_of(name) for name in PACKAGES}


def version_of(package: str) -> str:
    """Return the version of a package, from the first lines of its metadata: there may be thousands of others."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
    head = (found.read_text("METADATA") or "").partition("\n\n")[0]
    of_lines = re.search(r"^Version: *(\S+)", head, re.MULTILINE)
    return found.version if of_lines is None else of_lines[1]
