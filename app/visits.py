"""Which page is which: a page keeps its name through a reload, and two pages never share one by chance."""

import re
import secrets
import threading

from .jobs import JobQueue

NAME = re.compile(r"[0-9a-f]{32}")
# sessionStorage belongs to one tab of one browser and survives a reload. Names are random, so nobody guesses another's.
ASK_PAGE = """() => {
  let name = sessionStorage.getItem("patchpar-page");
  if (!name) {
    name = Array.from(crypto.getRandomValues(new Uint8Array(16)), b => b.toString(16).padStart(2, "0")).join("");
    sessionStorage.setItem("patchpar-page", name);
  }
  return name;
}"""


class PageSessions:
    """Connections of pages. A reload ends one and begins another, in any order."""

    def __init__(self, desk: JobQueue) -> None:
        self._desk = desk
        self._lock = threading.Lock()
        self._owner_of: dict[str, str] = {}

    def arrive(self, session: str, name: str) -> str:
        """A page is there, and calls itself so; the name it goes by. A name that is none is replaced."""
        owner = name if NAME.fullmatch(name or "") else secrets.token_hex(16)
        with self._lock:
            self._owner_of[session] = owner
        self._desk.back(owner)
        return owner

    def leave(self, session: str) -> None:
        """A connection has ended. The page has left if it has no other."""
        with self._lock:
            owner = self._owner_of.pop(session, None)
            is_here = owner in self._owner_of.values()
        if owner is not None and not is_here:
            self._desk.left(owner)
