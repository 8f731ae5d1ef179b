"""Pages of memory: those of mapped files are given back when they have been read, others taken before a write."""

import bisect
import ctypes
import mmap
import re
import sys
from pathlib import Path

OURS = "/memfd:patchpar-block"  # a pipeline from the caller
POPULATE_WRITE = 23  # of madvise; Python has no name for it
PRIVATE = re.compile(r"^(\w+)-(\w+) \S{3}p \S+ \S+ \S+ +(/.*)$", re.MULTILINE)  # lines of mappings with a path
NO_FILES = ("/dev/", "/memfd:", "/SYSV", "/anon_hugepage")  # whose pages would be lost


class FilePages:
    """The private mappings of files that this process has now. `release` is for bytes that are not read again.

    Does nothing where the system has no /proc, such as macOS.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        table = Path("/proc/self/maps")
        for found in PRIVATE.finditer(table.read_text() if sys.platform == "linux" and table.exists() else ""):
            first, last, path = found.groups()
            if _is_of_a_file(path):
                self._starts.append(int(first, 16))
                self._ends.append(int(last, 16))

    def have(self, address: int, num_bytes: int) -> bool:
        """Whether these bytes are in one mapping of a file."""
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and address + num_bytes <= self._ends[index]

    def release(self, address: int, num_bytes: int) -> None:
        """Release the whole pages among these bytes if they are unchanged pages of a file: it still has them."""
        if not self.have(address, num_bytes):
            return
        _advise(address, num_bytes, mmap.MADV_DONTNEED)


def _is_of_a_file(path: str) -> bool:
    return path.startswith(OURS) or not path.startswith(NO_FILES)


def take_pages(address: int, num_bytes: int) -> None:
    """Take memory for the whole pages among these bytes, which are written to next.

    Does nothing where the system cannot, such as a Linux before 5.14.
    """
    if sys.platform == "linux":
        _advise(address, num_bytes, POPULATE_WRITE)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
