"""Anonymous shared memory: a file without a name, passed by descriptor.

A block has no entry in /dev/shm or elsewhere, so that nothing is left behind: it is freed when the last process that
holds or maps it has ended, in whatever way. On Linux it is a memfd, which the size of /dev/shm (64 MB in a Docker
container by default) does not limit; elsewhere, or where the kernel refuses, it is an unlinked temporary file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from patchpar.launch.anonymous_file import aligned, anonymous_file


class SharedBlockWriter:
    """Writes buffers one after another into one block, which is created with the first buffer."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self.size = 0

    def append(self, data: memoryview) -> tuple[int, int]:
        """Append `data` to the block and return (offset, length) in bytes. Raises MemoryError if it does not fit."""
        if self._fd is None:
            self._fd = anonymous_file("patchpar-block")
        start = aligned(self.size)
        view = data.cast("B")
        done = 0
        try:
            while done < view.nbytes:  # one pwrite moves 2 GiB at most
                done += os.pwrite(self._fd, view[done:], start + done)
        except OSError as error:
            raise MemoryError(f"{start + view.nbytes:,} bytes of shared memory are not available: {error}") from error
        self.size = start + view.nbytes
        return start, view.nbytes

    def finish(self) -> SharedBlock | None:
        """Return the block, which the caller has to close; None if nothing was written."""
        if self._fd is None:
            return None
        block, self._fd = SharedBlock(self._fd, self.size), None
        return block

    def discard(self) -> None:
        """Free the block."""
        block = self.finish()
        if block is not None:
            block.close()


class SharedBlock:
    """A finished block: a descriptor and a length in bytes. Its holder has to close it."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._close = weakref.finalize(self, os.close, fd)

    def close(self) -> None:
        """Close the descriptor. Mappings of the block stay valid."""
        self._close()

    def map(self) -> memoryview:
        """Return the bytes of the block, without a copy, writable, and private to this process.

        Processes that map a block share its pages until one writes to a page (copy on write), so that weights changed
        in place on one rank do not change on another. The memory is unmapped when its last view is deleted, and no
        descriptor stays open. Raises MemoryError.
        """
        return memoryview(_map_private(self.fd, self.size)).cast("B")


def _map_private(fd: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return a ctypes array over mmap(fd).

    Python's mmap duplicates the descriptor until it is unmapped: a caller that keeps a thousand images would run out of
    descriptors.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise MemoryError(f"cannot map {size:,} bytes of shared memory: {os.strerror(code)}")
    array = (ctypes.c_ubyte * size).from_address(address)
    unmap = weakref.finalize(array, libc.munmap, address, size)
    unmap.atexit = False  # other threads may still use arrays at exit, and the process ends anyway
    return array
