"""Heartbeats in shared memory: the last exchange point of a rank, readable also when it hangs or has been killed.

    page:  [count][offset][waits][work][stream][moved][begun: u64 each] [length: u16, text] [length: u16, text] ...
                     |______________________________________________________________^

A rank counts its heartbeats and stores the offset of the text of the last one. Worker and caller both map the page, an
anonymous file. A text is written once, when it is first used, so that a heartbeat costs two stores. `waits` is not 0
while the rank waits for another, `stream` is not while the stream of its GPU does; `work` is its processor time in ms,
as of the last ping that it answered. `moved` counts parts of long messages that have come or gone while it waits.
`begun` is the number of the latest request that it has begun.
"""

import mmap
import os
import struct

from patchpar.launch.hang_detection import RankActivity

PAGE_BYTES = 256 * 1024  # unused pages take no memory
HEAD = struct.Struct("<QQQQQQQ")
COUNT, OFFSET, WAITS, WORK, STREAM, MOVED, BEGUN = range(7)
LENGTH = struct.Struct("<H")
MAX_TEXT = 200


class Heartbeat:
    """The writer, in the worker."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES)
        self._head = memoryview(self._page)[: HEAD.size].cast("Q")
        self.waiting = WaitingFlag(self._head)
        self._offsets: dict[str, int] = {}
        self._end = HEAD.size
        self._count = 0

    def beat(self, where: str) -> None:
        """Count one heartbeat and store its text `where`."""
        offset = self._offsets.get(where)
        if offset is None:
            offset = self._store_text(where)
        self._count += 1
        self._head[OFFSET] = offset
        self._head[COUNT] = self._count

    def begin(self, request: int) -> None:
        """Store the number of a request that begins."""
        self._head[BEGUN] = request

    def show_work(self) -> None:
        """Store the processor time of this process, with all its threads and the children that it has reaped."""
        self._head[WORK] = int(1000 * sum(os.times()[:4]))

    def snapshot(self) -> bytes:
        """Return count, waits, work and the last text, for a caller that cannot map the page: see SentHeartbeat."""
        return bytes(self._page[: HEAD.size]) + _text(self._page)

    def _store_text(self, where: str) -> int:
        text = where.encode()[:MAX_TEXT]
        if self._end + LENGTH.size + len(text) > PAGE_BYTES:  # full of texts that are not used any more: start again
            self._offsets.clear()
            self._end = HEAD.size
        offset = self._end
        LENGTH.pack_into(self._page, offset, len(text))
        self._page[offset + LENGTH.size : offset + LENGTH.size + len(text)] = text
        self._end = offset + LENGTH.size + len(text)
        self._offsets[where] = offset
        return offset


class WaitingFlag:
    """A reentrant context manager: the rank waits for another one, and processor time does not count as work."""

    def __init__(self, head: memoryview) -> None:
        self._head = head

    def __enter__(self) -> None:
        self._head[WAITS] += 1

    def __exit__(self, *_: object) -> None:
        self._head[WAITS] -= 1

    def set_stream_waiting(self, waits: bool) -> None:
        """Store whether the stream of this rank's GPU waits for another rank. From one thread at a time."""
        self._head[STREAM] = waits

    def count_part(self) -> None:
        """Count a part of a long message that has come or gone. No heartbeat: ranks in step have equally many."""
        self._head[MOVED] += 1


class HeartbeatReader:
    """The reader, in the caller. Reading never blocks."""

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, PAGE_BYTES)
        self._page = mmap.mmap(fd, PAGE_BYTES)

    @property
    def sign(self) -> RankActivity:
        """The rank's current activity."""
        return _activity(self._page)

    @property
    def where(self) -> str:
        """The text of the last heartbeat; empty before the first."""
        return _text(self._page).decode(errors="replace")

    def has_begun(self, request: int) -> bool:
        """Return whether the rank has begun this request, or a later one."""
        return bool(HEAD.unpack_from(self._page, 0)[BEGUN] >= request)

    def close(self) -> None:
        """Unmap the page, for a rank that could not be started. Otherwise it is unmapped with this object."""
        self._page.close()


class SentHeartbeat:
    """The reader where there is no common memory: `update` gets the `snapshot` that comes with every message."""

    def __init__(self) -> None:
        self._last = bytes(HEAD.size)

    def update(self, snapshot: bytes) -> None:
        """Take the place of an earlier snapshot."""
        self._last = snapshot

    @property
    def sign(self) -> RankActivity:
        """The rank's activity when it sent its last message."""
        return _activity(self._last)

    @property
    def where(self) -> str:
        """The text of the last heartbeat; empty before the first."""
        return self._last[HEAD.size :].decode(errors="replace")

    def has_begun(self, request: int) -> bool:
        """Return True: a rank that has died since its last message may have begun any request."""
        return True


def _text(page: mmap.mmap) -> bytes:
    """Return the text of the last heartbeat on a page; empty before the first."""
    offset = HEAD.unpack_from(page, 0)[OFFSET]
    if not offset:
        return b""
    (length,) = LENGTH.unpack_from(page, offset)
    return bytes(page[offset + LENGTH.size : offset + LENGTH.size + length])


def _activity(page: bytes | mmap.mmap) -> RankActivity:
    count, _, waits, work, stream, moved, _ = HEAD.unpack_from(page, 0)
    return RankActivity(beats=count, work=work / 1000, waits=waits > 0 or stream > 0, moved=moved)
