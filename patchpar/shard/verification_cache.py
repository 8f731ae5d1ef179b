"""Remember which denoisers have been checked against their plain forward, so that each is checked once.

A verdict holds for one denoiser class, config and fingerprint, strategy, number of bands, dtype, set of arguments and
set of versions. One small JSON file each, under the user's cache folder.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from patchpar.plan.json_files import read_object

log = logging.getLogger(__name__)
T = TypeVar("T")
NOWHERE = Path(os.devnull)  # no file can be made below it


@dataclass(frozen=True, slots=True)
class VerificationCache:
    """Verdicts kept in `folder`."""

    folder: Path

    @classmethod
    def in_home(cls) -> "VerificationCache":
        """The ones of this user. One without a home, as in a container with a user id of its own, keeps none."""
        try:
            home = Path.home()
        except RuntimeError:
            home = NOWHERE
        return cls(home / ".cache" / "patchpar" / "verified")

    @classmethod
    def of(cls, verify: bool | Path) -> "VerificationCache | None":
        """What `verify` means: the ones of a folder, of this user, or none."""
        if isinstance(verify, Path):
            return cls(verify)
        return cls.in_home() if verify else None

    def key(self, facts: Mapping[str, Any]) -> str:
        """A name for a set of facts, with the versions that matter added."""
        versions = {name: _version(name) for name in ("patchpar", "torch", "diffusers")}
        text = json.dumps({**facts, "versions": versions}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def find(self, key: str, what: str, read: Callable[[Any], T]) -> T | None:
        """What was found then, such as the "relative_error", out of what `read` makes of it; None if nothing was."""
        file = self.folder / f"{key}.json"
        if not file.is_file():
            return None
        try:
            return read(read_object(file)[what])
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            log.warning("%s is not what was written there, and is left aside: %s", file, f"{error!r:.200}")
            return None

    def remember(self, key: str, facts: Mapping[str, Any], **found: Any) -> None:
        """Write down what was found. A folder that cannot be written only means checking again next time."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f"{key}.json"
            draft = file.with_suffix(f".{os.getpid()}")  # ranks may write the same verdict at once
            draft.write_text(json.dumps({**facts, **found}, indent=1, default=str))
            draft.replace(file)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
