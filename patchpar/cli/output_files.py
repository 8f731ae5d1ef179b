"""Output files: check the path before the run, and write complete files after it."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchpar.errors import PatchparError, PlanError

if TYPE_CHECKING:
    from PIL.Image import Image
LARGE = 1024 * 1024  # pixels; compression of smaller images takes little time
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
TEMPORARY = ".patchpar-"  # not the file's own name, to which nothing can be added if it is as long as names may be
TRIED_BYTES = 2**16
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Errors of a file system that takes no more."""


def check_can_write(path: Path, flag: str, example: str) -> None:
    """Raise PlanError if no file can be written to `path` of the option `flag`; `example` is a file name."""
    _check_no_folder(path, flag, example)
    folder = path.parent
    if folder.is_file():
        raise PlanError(f"cannot write {path}: {folder} is a file, and no folder; choose another path with {flag}")
    if not folder.is_dir():
        raise PlanError(f"cannot write {path}: there is no folder {folder}; make it first, or choose another")
    if not os.access(folder, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise PlanError(f"cannot write {path}: no permission; choose another path with {flag}")
    try:  # where permissions say yes, and the file system does not
        with tempfile.TemporaryFile(dir=folder) as tried:
            tried.write(bytes(TRIED_BYTES))
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}; choose another path with {flag}") from error


def check_suffix(path: Path, known: Collection[str], what: str) -> None:
    """Raise PlanError for a folder, and for a path that has none of the `known` suffixes of `what`: image or video."""
    _check_no_folder(path, "--output", f"{what}{next(iter(known))}")
    if path.suffix.lower() not in known:
        use = ", ".join(known)
        raise PlanError(f"cannot write {path}: the suffix {path.suffix!r} names no {what} format; use one of {use}")


def _check_no_folder(path: Path, flag: str, example: str) -> None:
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long
        raise PlanError(f"cannot write {path}: {error.strerror}; choose another path with {flag}") from error
    if is_folder:
        raise PlanError(f"cannot write {path}: it is a folder; name a file, such as {path / example}")


def check_apart(*paths: Path | None) -> None:
    """Raise PlanError where two outputs are one file, of which only the last would be left. None: no output."""
    given = [path.resolve() for path in paths if path is not None]
    if twice := next((path for path in given if given.count(path) > 1), None):
        raise PlanError(f"two outputs would be {twice}: name another file for one of them")


class FullDisk(PatchparError):
    """The disk takes no more of a file."""


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Raise FullDisk that names `path` where the `with` block fails because the disk takes no more."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        way_out = "free some space there, or choose another path"
        raise FullDisk(f"cannot write {path}: {error.strerror}; {way_out}") from error


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, renamed to `path` at the end, so that no partial file appears.

    Raises PatchparError where the disk is full.
    """
    with full_disk_named(path):
        temporary = _temporary_beside(path)
        try:
            yield temporary
            temporary.chmod(0o666 & ~_umask())  # mkstemp creates a private file; this is an ordinary one
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _temporary_beside(path: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, suffix=path.suffix, dir=path.parent)
    os.close(handle)
    return Path(name)


@contextmanager
def removed_after_error(path: Path | None) -> Iterator[None]:
    """Remove the file at `path`, if there is one, where the `with` block raises."""
    try:
        yield
    except BaseException:
        if path is not None and path.is_file():
            path.unlink()
        raise


class GrowingFile:
    """A file that grows under a temporary name, until `appear` gives it its own: what is in it can be used by then."""

    def __init__(self, path: Path) -> None:
        self._path, self.temporary = path, _temporary_beside(path)

    def appear(self) -> None:
        """Rename it. Idempotent."""
        if self.temporary.exists():
            self.temporary.chmod(0o666 & ~_umask())
            self.temporary.replace(self._path)

    def close(self) -> None:
        """Remove it if it has not appeared."""
        self.temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)  # what another thread makes meanwhile is no one else's
    os.umask(mask)
    return mask


def names_for(path: Path, count: int) -> list[Path]:
    """Return `out.png` for one image; `out-1.png`, `out-2.png` ... for several. Raises PlanError as `with_word`."""
    return [path] if count == 1 else [with_word(path, str(number)) for number in range(1, count + 1)]


def with_word(path: Path, word: str) -> Path:
    """Return `out-word.png` of `out.png`. Raises PlanError for what is no name of an image, as given by the person."""
    check_suffix(path, SUFFIXES, "image")
    return path.with_stem(f"{path.stem}-{word}")


def check_writable(path: Path) -> None:
    """Raise PlanError if an image cannot be written to `path`. Call it before the run."""
    check_suffix(path, SUFFIXES, "image")
    check_can_write(path, "--output", "image.png")


def save(image: Image, path: Path) -> None:
    """Write a complete file or none. A large PNG is compressed less: a fifth of the time, for a sixth more bytes."""
    is_large = image.width * image.height > LARGE
    options: dict[str, Any] = {"compress_level": 1} if path.suffix.lower() == ".png" and is_large else {}
    with written_whole(path) as temporary:
        image.save(temporary, **options)
