"""Output files: check the path before the run, and write complete files after it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patchpar.errors import PlanError


def check_can_write(path: Path, flag: str, example: str) -> None:
    """Raise PlanError if no file can be written to `path` of the option `flag`; `example` is a file name."""
    if path.is_dir():
        raise PlanError(f"cannot write {path}: it is a folder; name a file, such as {path / example}")
    folder = path.parent
    if not folder.is_dir():
        raise PlanError(f"cannot write {path}: there is no folder {folder}; make it first, or choose another")
    if not os.access(folder, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise PlanError(f"cannot write {path}: no permission; choose another path with {flag}")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, renamed to `path` at the end, so that no partial file appears."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp creates a private file; this is an ordinary one
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
