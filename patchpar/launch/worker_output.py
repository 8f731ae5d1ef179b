"""Output of workers: copied to this process's stderr, with the last lines kept for error messages.

Both stdout and stderr of a worker are read here, so that this process's stdout has only its own output.
A line that another rank has printed already is not printed again, since libraries warn once per process.
Each character is processed once, whatever the length of a line, so that this thread does not hold the GIL for long.
"""

import codecs
import contextlib
import os
import re
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from io import FileIO

TAIL_LINES = 20
REMEMBERED_LINES = 2000
LONGEST_LINE = 8192  # characters; the rest of a longer line is counted and left out
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)")


class FirstPrinter:
    """Remembers which rank was the first to print a line."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def is_first(self, rank: int, line: str) -> bool:
        """Return whether no other rank has printed this line before."""
        if not line.strip():
            return rank == 0
        with self._lock:
            first = self._ranks.setdefault(line, rank)
            if len(self._ranks) > REMEMBERED_LINES:
                self._ranks.popitem(last=False)
        return first == rank


class WorkerOutput:
    """Reads one worker's pipe in a thread until its end, and calls `at_end` there."""

    def __init__(
        self, rank: int, pipe: FileIO, speakers: FirstPrinter, at_end: Callable[[], object] | None = None
    ) -> None:
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

        def read() -> None:
            _pump(pipe, rank, speakers, self._tail)
            if at_end is not None:
                at_end()

        self._thread = threading.Thread(target=read, name=f"patchpar-output-{rank}", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """Return the last lines, stripped; empty if nothing was printed."""
        return "".join(list(self._tail)).strip()

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` until all output has been read; call it after the worker has ended."""
        self._thread.join(seconds)


class LineSplitter:
    """Splits a stream of text into lines with their line ends, truncated to LONGEST_LINE."""

    def __init__(self) -> None:
        self._begun: list[str] = []  # the current line, which has no end yet
        self._length = 0  # of the current line, with what is left out
        self._held = ""  # a carriage return, which may be half of a line end

    def feed(self, text: str) -> list[str]:
        """Return the lines that end in this text."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        lines, rest = whole_lines(text[: len(text) - len(self._held)])
        found = [self._ended(line) for line in lines]
        self._keep(rest)
        return found

    def finish(self) -> list[str]:
        """Return the unfinished line with a line end; nothing if there is none."""
        has_rest = self._length or self._held
        return [self._ended(self._held or "\n")] if has_rest else []

    def _keep(self, text: str) -> None:
        if self._length < LONGEST_LINE:
            self._begun.append(text[: LONGEST_LINE - self._length])
        self._length += len(text)

    def _ended(self, line: str) -> str:
        text = line.rstrip("\r\n")
        self._keep(text)
        note = f" [a line of {self._length} characters, cut]" if self._length > LONGEST_LINE else ""
        whole = "".join(self._begun) + note + line[len(text) :]
        self._begun, self._length = [], 0
        return whole


def whole_lines(text: str) -> tuple[list[str], str]:
    """Return the complete lines with their line ends, and the rest."""
    end = 1 + max(text.rfind("\n"), text.rfind("\r"))
    return LINE.findall(text[:end]), text[end:]  # without a line end the pattern would search from every character


def _pump(pipe: FileIO, rank: int, speakers: FirstPrinter, tail: deque[str]) -> None:
    decoder, lines = codecs.getincrementaldecoder("utf-8")(errors="replace"), LineSplitter()

    def pass_on(found: list[str]) -> None:
        tail.extend(found)
        _pass_on("".join(line for line in found if speakers.is_first(rank, line)))

    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            pass_on(lines.feed(decoder.decode(data)))
    pass_on(lines.feed(decoder.decode(b"", final=True)))
    pass_on(lines.finish())


def _pass_on(text: str) -> None:
    if text and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason to stop reading
            sys.stderr.write(text)
            sys.stderr.flush()
