"""Start-up of a worker pool: configuration, environment variables and the store of torch's default group."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import patchpar
from patchpar.launch.accelerators import is_accelerator
from patchpar.launch.anonymous_file import anonymous_file
from patchpar.launch.message_seal import new_key

PACKAGE_ROOT = str(Path(patchpar.__file__).resolve().parent.parent)
# "-c" and "-m" put the working directory first on the path: a file called types.py there would be imported.
OWN_PATH = "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; "
BOOT = OWN_PATH + "from {} import main; main(*map(int, sys.argv[2:]))"
# What torchrun sets for its ranks. A worker is a rank of its pool only.
TORCHRUN_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
TORCHRUN_PREFIX = "TORCHELASTIC_"
INTERFACE = "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What a worker has of the process that started it: a module path, and file descriptors under the same numbers."""

    path: tuple[str, ...]
    heartbeat: int
    lifeline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The first message to a worker. Times in seconds.

    `group_store`: a path or "tcp://host:port", if the ranks communicate through torch's default group. `session_key`:
    of messages through that group; empty without one. `inherited`: None on another node than the caller.
    """

    rank: int
    world_size: int
    device: str
    engine: str
    preload: tuple[str, ...]
    deadline: float
    start_timeout: float
    group_timeout: float
    threads: int
    group_store: str | None
    session_key: bytes
    inherited: Inherited | None


class GroupStore:
    """The file of a torch FileStore, through which ranks with a GPU each meet, for NCCL to connect them.

    On Linux it has no name: workers inherit it and open it through /proc, so that `kill -9` leaves no file behind.
    """

    def __init__(self) -> None:
        self._folder = ""
        self.inherit: tuple[int, ...] = ()
        self.session_key = new_key()
        if Path("/proc/self/fd").exists():
            self.inherit = (anonymous_file("patchpar-store"),)
            self.path = f"/proc/self/fd/{self.inherit[0]}"
        else:
            self._folder = tempfile.mkdtemp(prefix="patchpar-")  # mode 0700
            self.path = str(Path(self._folder) / "store")

    def close(self) -> None:
        """Remove the file. Idempotent."""
        descriptors, self.inherit = self.inherit, ()
        for fd in descriptors:
            os.close(fd)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def needs_group(devices: tuple[str, ...]) -> bool:
    """Return whether these ranks communicate through NCCL or its like, which allow one rank per GPU."""
    on_gpus = all(is_accelerator(name) for name in devices)
    return on_gpus and 1 < len(devices) == len(set(devices))


def versions() -> dict[str, str]:
    """Return the versions that have to be equal in caller and workers."""
    version = "not installed"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("patchpar")
    return {"python": platform.python_version(), "patchpar": f"{version} in {PACKAGE_ROOT}"}


def python_command(module: str, *numbers: int) -> list[str]:
    """Return the command that runs `main(*numbers)` of a module of this package in a new Python process."""
    return [sys.executable, "-c", BOOT.format(module), PACKAGE_ROOT, *map(str, numbers)]


def worker_environment(threads: int) -> dict[str, str]:
    """Return a worker's environment: that of this process with OMP_NUM_THREADS, and without torchrun's variables.

    NCCL uses the loopback interface to connect ranks, unless the environment names another one.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(TORCHRUN_PREFIX)
    }
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONUNBUFFERED"] = "1"
    return {**environment, **interface_between_ranks()}


def interface_between_ranks() -> dict[str, str]:
    """Return the variable that names the loopback interface for NCCL, so that ranks of one host need no network.

    Empty if the environment names an interface, or if there is no loopback.
    """
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), "")
    return {INTERFACE: loopback} if loopback and INTERFACE not in os.environ else {}


def threads_per_rank(cores: int, workers: int) -> int:
    """Return the threads per worker: cores divided by workers, at most OMP_NUM_THREADS, at least 1."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    equal = max(1, cores // workers)
    return min(equal, int(requested)) if requested.isdigit() and int(requested) > 0 else equal
