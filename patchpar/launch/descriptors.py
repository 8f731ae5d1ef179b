"""File descriptors that come through a socket with the bytes that name them; those of stdin, stdout and stderr."""

import errno
import os
import socket

CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux; elsewhere a later exec would inherit them


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
    data, descriptors, flags, _ = socket.recv_fds(link, num_bytes, most, CLOSE_ON_EXEC)
    if flags & socket.MSG_CTRUNC:
        for each in descriptors:
            os.close(each)
        raise OSError(errno.EMFILE, "this process has as many open files as it may: raise `ulimit -n`")
    return data, descriptors
