"""Free memory of this host, and of the devices of ranks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CONTEXT_BYTES = 700_000_000
"""Of a GPU's memory, for the CUDA context and kernels of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Free bytes on each device, None for ranks on the CPU, and of the host; None where they are unknown."""

    device: int | None
    host: int | None

    @classmethod
    def least(cls, found: Sequence["FreeMemory"]) -> "FreeMemory":
        """Return what is free on every rank."""
        devices = [each.device for each in found if each.device is not None]
        hosts = [each.host for each in found if each.host is not None]
        return cls(device=min(devices, default=None), host=min(hosts, default=None))

    def times(self, factor: float) -> "FreeMemory":
        """Return a part of it."""
        device, host = (None if each is None else int(each * factor) for each in (self.device, self.host))
        return FreeMemory(device=device, host=host)


def free_memory() -> int | None:
    """Return the free memory in bytes: that of the system, within the limit of a container."""
    limits = [_free_in_system(), _free_in_container()]
    return min((limit for limit in limits if limit is not None), default=None)


def _free_in_container() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        cache = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if limit == "max" else int(limit) - int(used) + (int(cache.group(1)) if cache else 0)


def _free_in_system() -> int | None:
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    match = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())
    return int(match.group(1)) * 1024 if match else None
