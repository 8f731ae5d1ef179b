"""Where a rank is, readable from outside at any moment: also when it hangs, is stopped, or has just been killed.

    page:  [count: u64][place: u64] [length: u16, text] [length: u16, text] ...
                          |________________^

A rank counts its marks and points at the text of the last one; the page is an anonymous file which worker and caller
both map. A text is written once, when it is first seen, so that a mark costs two stores.
"""

from __future__ import annotations

import mmap
import os
import struct

PAGE_BYTES = 256 * 1024  # only the part in use takes memory
HEAD = struct.Struct("<QQ")
LENGTH = struct.Struct("<H")
MAX_TEXT = 200


class Beacon:
    """The writer's end."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES)
        self._head = memoryview(self._page)[: HEAD.size].cast("Q")
        self._places: dict[str, int] = {}
        self._end = HEAD.size
        self._count = 0

    def mark(self, where: str) -> None:
        """Count one mark and say where it was made."""
        place = self._places.get(where)
        if place is None:
            place = self._learn(where)
        self._count += 1
        self._head[1] = place
        self._head[0] = self._count

    def _learn(self, where: str) -> int:
        text = where.encode()[:MAX_TEXT]
        if self._end + LENGTH.size + len(text) > PAGE_BYTES:  # full of texts that were used once: begin again
            self._places.clear()
            self._end = HEAD.size
        place = self._end
        LENGTH.pack_into(self._page, place, len(text))
        self._page[place + LENGTH.size : place + LENGTH.size + len(text)] = text
        self._end = place + LENGTH.size + len(text)
        self._places[where] = place
        return place


class BeaconReader:
    """The other end. Reading never waits."""

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, PAGE_BYTES)
        self._page = mmap.mmap(fd, PAGE_BYTES)

    @property
    def count(self) -> int:
        """How many marks the rank has made."""
        count, _ = HEAD.unpack_from(self._page, 0)
        return int(count)

    @property
    def where(self) -> str:
        """The text of the last mark; empty before the first."""
        _, place = HEAD.unpack_from(self._page, 0)
        if place == 0:
            return ""
        (length,) = LENGTH.unpack_from(self._page, place)
        return bytes(self._page[place + LENGTH.size : place + LENGTH.size + length]).decode(errors="replace")
