"""Files without a name: memory that processes share by passing a file descriptor."""

import os
import tempfile

ALIGNMENT = 64  # bytes: enough for vector instructions and every dtype


def aligned(num_bytes: int) -> int:
    """Round `num_bytes` up to a multiple of ALIGNMENT, where a tensor or array of any dtype can start."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def anonymous_file(name: str) -> int:
    """Return a descriptor of an empty file without a name. `name` is shown in /proc only.

    A memfd on Linux; an unlinked temporary file elsewhere, or where a sandbox or an old kernel refuses memfd_create.
    """
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create(name)
        except OSError:  # use the file below instead
            pass
    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        return os.dup(file.fileno())
