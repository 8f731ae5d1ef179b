"""What workers print: passed on to this process's stderr, and the last lines kept for error messages.

Both stdout and stderr of a worker come here, so that a program's own stdout stays its own.
A line that another rank has printed already is not printed again: libraries warn once per process.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import OrderedDict, deque

TAIL_LINES = 20
REMEMBERED_LINES = 2000
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)")


class FirstSpeaker:
    """Remembers which rank was the first to print a line."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def is_first(self, rank: int, line: str) -> bool:
        """Whether no other rank has printed this line."""
        if not line.strip():
            return rank == 0
        with self._lock:
            first = self._ranks.setdefault(line, rank)
            if len(self._ranks) > REMEMBERED_LINES:
                self._ranks.popitem(last=False)
        return first == rank


class Output:
    """Reads one worker's pipe in a thread, to its end."""

    def __init__(self, rank: int, fd: int, speakers: FirstSpeaker) -> None:
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._thread = threading.Thread(
            target=_pump, args=(fd, rank, speakers, self._tail), name=f"patchpar-output-{rank}", daemon=True
        )
        self._thread.start()

    def tail(self) -> str:
        """The last lines, without trailing space; empty if nothing was printed."""
        return "".join(list(self._tail)).strip()

    def finish(self, seconds: float) -> None:
        """Wait until everything has been read; to be called when the worker has ended."""
        self._thread.join(seconds)


def _pump(fd: int, rank: int, speakers: FirstSpeaker, tail: deque[str]) -> None:
    rest = ""
    with open(fd, "rb", buffering=0) as pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            rest += data.decode(errors="replace")
            lines = LINE.findall(rest)
            rest = rest[sum(map(len, lines)) :]
            tail.extend(lines)
            _pass_on("".join(line for line in lines if speakers.is_first(rank, line)))
    if rest:
        tail.append(rest)
        _pass_on(rest + "\n")


def _pass_on(text: str) -> None:
    if text and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason to stop reading
            sys.stderr.write(text)
            sys.stderr.flush()
