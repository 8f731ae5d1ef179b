"""Whether a call has failed for lack of memory."""

from patchpar.errors import WorkerOutOfMemory


def is_out_of_memory(error: Exception) -> bool:
    """Return whether torch had no memory left on a device. By name, so that torch need not be imported."""
    known = isinstance(error, (MemoryError, WorkerOutOfMemory))
    return known or any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)
