"""Identifies pages: a page keeps its name through a reload, and names are unique."""

import re
import secrets
import threading

from .job_queue import JobQueue

NAME = re.compile(r"[0-9a-f]{32}")
# sessionStorage belongs to one tab of one browser and survives a reload. Random names cannot be guessed.
PAGE_NAME_JS = """() => {
  let name = sessionStorage.getItem("patchpar-page");
  if (!name) {
    name = Array.from(crypto.getRandomValues(new Uint8Array(16)), b => b.toString(16).padStart(2, "0")).join("");
    sessionStorage.setItem("patchpar-page", name);
  }
  return name;
}"""


class PageSessions:
    """Connections of pages. A reload ends one and opens another, in either order."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._owner_of: dict[str, str] = {}

    def connect(self, session: str, name: str) -> str:
        """Register a page's connection. Returns its name; an invalid name is replaced."""
        owner = name if NAME.fullmatch(name or "") else secrets.token_hex(16)
        with self._lock:
            self._owner_of[session] = owner
            self._queue.page_returned(owner)
        return owner

    def disconnect(self, session: str) -> None:
        """A connection has ended. The page has gone if it has no other."""
        with self._lock:
            owner = self._owner_of.pop(session, None)
            if owner is not None and owner not in self._owner_of.values():
                self._queue.page_left(owner)  # before another connection is made, which ends its grace period
