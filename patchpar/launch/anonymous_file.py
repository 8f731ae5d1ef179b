"""Files without a name: memory that processes share by passing a descriptor."""

import os
import tempfile

ALIGNMENT = 64  # bytes: what vector instructions and every dtype are content with


def aligned(num_bytes: int) -> int:
    """Round up, so that a tensor or an array of any dtype may begin there."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def anonymous_file(name: str) -> int:
    """A descriptor of an empty file that has no name. `name` is shown in /proc only.

    On Linux a memfd; elsewhere, or where a sandbox or an old kernel refuses that, an unlinked temporary file.
    """
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create(name)
        except OSError:  # the file below is the same thing, on disk
            pass
    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        return os.dup(file.fileno())
