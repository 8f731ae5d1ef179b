"""Whether workers are forked from a template process or started as new Python processes, and why."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from patchpar.errors import LaunchError
from patchpar.launch.accelerators import is_accelerator

StartMethodName = Literal["forkserver", "spawn"]
"""Named as in multiprocessing."""
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMethod:
    """How workers are started. `note`: the reason, as a sentence."""

    name: StartMethodName
    note: str


def resolve_start_method(asked: object, devices: Sequence[str]) -> StartMethod:
    """Return how the workers of these devices are started.

    `asked`: "auto" (forkserver where it is possible), "forkserver" or "spawn". Raises LaunchError for any other value,
    and for "forkserver" where it is not possible.
    """
    if asked == AUTO:
        reason = _why_not_fork(devices)
        forks = StartMethod(name="forkserver", note="workers are forked from one process that has imported torch")
        return StartMethod(name="spawn", note=f"each worker is a new Python process: {reason}") if reason else forks
    if asked not in get_args(StartMethodName):
        raise LaunchError(f"start_method={asked!r}: use 'auto', 'forkserver' or 'spawn'")
    reason = _why_not_fork(devices) if asked == "forkserver" else ""
    if reason:
        raise LaunchError(f"start_method='forkserver' is not possible: {reason}; use 'auto' or 'spawn'")
    return StartMethod(name=cast(StartMethodName, asked), note=f"start_method={asked!r}, as asked for")


def _why_not_fork(devices: Sequence[str]) -> str:
    """Return why workers of these devices cannot be forked; empty if they can."""
    if any(map(is_accelerator, devices)):
        return "drivers of GPUs are not made for forked processes"
    if sys.platform != "linux" or not hasattr(signal, "pidfd_send_signal"):
        return "file descriptors of processes (pidfd) are only on Linux"
    if not Path("/proc/thread-self/status").exists():
        return "/proc is not mounted, which shows whether a process may be forked"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"this system does not give file descriptors of processes (pidfd_open: {error.strerror})"
    return ""
