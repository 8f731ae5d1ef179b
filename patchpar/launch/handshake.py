"""How the workers of one pool are introduced: to their task, to their environment, and to each other."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import patchpar
from patchpar.launch.anonymous_file import anonymous_file

PACKAGE_ROOT = str(Path(patchpar.__file__).resolve().parent.parent)
# What torchrun sets for its own ranks. A worker is nobody's rank but its pool's.
TORCHRUN_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
TORCHRUN_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker is told first."""

    rank: int
    world_size: int
    device: str
    engine: str
    preload: tuple[str, ...]
    deadline: float
    group_timeout: float
    threads: int
    path: tuple[str, ...]
    nccl_store: str | None  # a path, where the ranks talk through NCCL
    heartbeat: int  # descriptors, inherited under the same numbers
    lifeline: int
    links: dict[int, int]  # by the rank at the other end


class NcclStore:
    """The file through which ranks on GPUs of their own agree on NCCL's unique id (a torch FileStore).

    On Linux it has no name: the workers inherit it and open it through /proc, so even `kill -9` leaves nothing behind.
    """

    def __init__(self) -> None:
        self._folder = ""
        self.inherit: tuple[int, ...] = ()
        if Path("/proc/self/fd").exists():
            self.inherit = (anonymous_file("patchpar-store"),)
            self.path = f"/proc/self/fd/{self.inherit[0]}"
        else:
            self._folder = tempfile.mkdtemp(prefix="patchpar-")  # mode 0700
            self.path = str(Path(self._folder) / "store")

    def close(self) -> None:
        """Remove it. Harmless when done twice."""
        descriptors, self.inherit = self.inherit, ()
        for fd in descriptors:
            os.close(fd)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def needs_nccl(devices: tuple[str, ...]) -> bool:
    """Whether these ranks talk through NCCL, which cannot have two of them on one GPU."""
    on_gpus = all(name.startswith("cuda") for name in devices)
    return on_gpus and 1 < len(devices) == len(set(devices))


def versions() -> dict[str, str]:
    """What caller and workers must have in common."""
    version = "not installed"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("patchpar")
    return {"python": platform.python_version(), "patchpar": f"{version} in {PACKAGE_ROOT}"}


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker: ours, with its share of the cores, and no trace of torchrun.

    NCCL's ranks find each other over the loopback interface, unless the environment names another one.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(TORCHRUN_PREFIXES)
    }
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONUNBUFFERED"] = "1"
    loopback = loopback_interface()
    if loopback:
        environment.setdefault("NCCL_SOCKET_IFNAME", loopback)
    return environment


def loopback_interface() -> str:
    """The name of the loopback interface; empty if there is none, and NCCL then chooses."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "")


def threads_per_rank(cores: int, workers: int) -> int:
    """Threads per worker: an equal share of the cores, at most what OMP_NUM_THREADS asks for, at least 1."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    equal = max(1, cores // workers)
    return min(equal, int(requested)) if requested.isdigit() and int(requested) > 0 else equal
