"""Files that the command line writes: is the path good, before the work is done; whole files or none, after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patchpar.errors import PlanError


def check_can_write(path: Path, flag: str, example: str) -> None:
    """Raise PlanError if no file can be written to `path`, which came with `flag`; `example` is a file's name."""
    if path.is_dir():
        raise PlanError(f"cannot write {path}: it is a folder; name a file, such as {path / example}")
    folder = path.parent
    if not folder.is_dir():
        raise PlanError(f"cannot write {path}: there is no folder {folder}; make it first, or choose another")
    if not os.access(folder, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise PlanError(f"cannot write {path}: no permission; choose another place with {flag}")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, renamed at the end, so that nobody ever finds half a file."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        beside.chmod(0o666 & ~_umask())  # mkstemp makes it private; this is an ordinary file
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
