"""Images that a server keeps as files, for responses with links: whoever has the link of one may fetch it for a while.

A name is random, of 192 bits, and therefore the key to its file; nobody else can find it.
"""

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from patchpar.serving.folder_lock import FolderLock
from patchpar.serving.image_request import OutputFormat
from patchpar.serving.request_error import RequestError
from patchpar.serving.settings import KeptResults

ROUTE = "/v1/files/"
PREFIX = "file_"
NAME = re.compile(PREFIX + r"[0-9a-f]{48}\.(png|jpeg|webp)")
NAME_BYTES = 24
MAX_IMAGES = 10
"""Of a response."""


class ImageFiles:
    """Files of images in the folder of `kept`, which keeps them for as long as other results, of as many responses.

    No other server uses the folder until `close`: it would delete these files by its own limits. Raises PlanError if
    one does. `journal`: another folder of this server, which may be the same one.
    """

    def __init__(self, kept: KeptResults, journal: Path | None = None) -> None:
        self._folder, self._seconds, self._most = kept.folder, kept.seconds, kept.count * MAX_IMAGES
        self._most_bytes = kept.bytes
        self._lock: FolderLock | None = None
        if kept.folder is not None and (journal is None or not kept.folder.samefile(journal)):
            self._lock = FolderLock(kept.folder, "--files")

    def close(self) -> None:
        """Let another server use the folder. Idempotent."""
        if self._lock is not None:
            self._lock.close()

    def check(self, response_format: str | None) -> None:
        """Raise RequestError for a link where there is no folder."""
        if response_format == "url" and self._folder is None:
            raise RequestError(
                "response_format='url': this server keeps no files to link to, unless it is started with --files: use "
                "b64_json",
                param="response_format",
                code="unsupported_parameter",
            )

    def store(self, data: bytes, output_format: OutputFormat) -> str:
        """Write an image, and return the path of its link."""
        assert self._folder is not None, "requests for links are checked"
        self._sweep(len(data))
        name = f"{PREFIX}{secrets.token_hex(NAME_BYTES)}.{output_format}"
        beside = self._folder / f".{name}"
        try:
            beside.write_bytes(data)
            beside.replace(self._folder / name)
        finally:
            beside.unlink(missing_ok=True)
        return ROUTE + name

    def find(self, name: str) -> Path:
        """Return the file of a link. Raises RequestError, 404, for one that has expired, or never was."""
        path = None if self._folder is None or NAME.fullmatch(name) is None else self._folder / name
        if path is None or not self._is_kept(path):
            raise RequestError("there is no such file: it has expired, or never was", status=404, code="not_found")
        return path

    def delete(self, link: str) -> None:
        """Delete the file of a link's path."""
        with suppress(RequestError, OSError):
            self.find(link.removeprefix(ROUTE)).unlink()

    def _is_kept(self, path: Path) -> bool:
        with suppress(OSError):
            return time.time() - path.stat().st_mtime <= self._seconds
        return False

    def _sweep(self, added: int) -> None:
        """Delete files that have expired, and the oldest ones that leave no room for another one of `added` bytes."""
        taken = added
        for number, (_, path, size) in enumerate(sorted(self._files(), reverse=True)):
            taken += size
            if number + 1 >= self._most or taken > self._most_bytes or not self._is_kept(path):
                with suppress(OSError):
                    path.unlink()

    def _files(self) -> Iterator[tuple[float, Path, int]]:
        """Yield when a file was written, its path, and its bytes."""
        assert self._folder is not None
        for path in self._folder.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if NAME.fullmatch(path.name):
                    facts = path.stat()
                    yield facts.st_mtime, path, facts.st_size
