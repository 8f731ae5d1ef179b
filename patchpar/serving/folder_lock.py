"""A folder that one server at a time uses: of a journal, or of files."""

import logging
import os
import weakref
from pathlib import Path

from patchpar.errors import PlanError

log = logging.getLogger(__name__)


class FolderLock:
    """Keeps other servers from `folder` until `close`, or until this process has ended. Raises PlanError if one has it.

    `flag`: the command-line option that names the folder. Where the file system has no locks, the log says so.
    """

    def __init__(self, folder: Path, flag: str) -> None:
        try:
            import fcntl  # only here, since a server without folders also runs on Windows
        except ModuleNotFoundError as error:
            raise PlanError(f"{flag} {folder}: this system has no locks of folders: leave {flag} out") from error
        lock = os.open(folder, os.O_RDONLY)
        self._unlock = weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise PlanError(
                f"{flag} {folder}: another server uses it: end that one first, or use another folder"
            ) from error
        except OSError as error:
            log.warning("%s %s cannot be locked (%s): let no other server use it", flag, folder, error.strerror)

    def close(self) -> None:
        """Let another server use the folder. Idempotent."""
        self._unlock()
