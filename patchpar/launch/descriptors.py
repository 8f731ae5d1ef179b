"""File descriptors that come through a socket with the bytes that name them; those of stdin, stdout and stderr."""

import errno
import os
import socket
from array import array

CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # Linux; elsewhere a later exec would inherit them
TRUNCATED = int(socket.MSG_CTRUNC)  # an operation of socket's own flags takes as long as to receive
DESCRIPTOR_BYTES = array("i").itemsize

LAST_STANDARD = 2  # stderr


def open_standard_descriptors() -> None:
    """Open those of stdin, stdout and stderr that are closed, on the null device.

    The first sockets would have their numbers otherwise, which have another meaning in workers.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:
        pass
    os.close(number)


def receive_with_descriptors(link: socket.socket, num_bytes: int, most: int) -> tuple[bytes, list[int]]:
    """Return at most `num_bytes` bytes, and the descriptors, at most `most`, that were sent with them.

    Raises OSError, also where this process can have no further descriptor: the system drops it then, and without this
    the next one would be taken for it.
    """
    data, found, flags, _ = link.recvmsg(num_bytes, socket.CMSG_LEN(most * DESCRIPTOR_BYTES), CLOSE_ON_EXEC)
    descriptors = list[int]()
    for level, kind, numbers in found:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += array("i", numbers[: len(numbers) // DESCRIPTOR_BYTES * DESCRIPTOR_BYTES])
    if flags & TRUNCATED:
        for each in descriptors:
            os.close(each)
        raise OSError(errno.EMFILE, "this process has as many open files as it may: raise `ulimit -n`")
    return data, descriptors
