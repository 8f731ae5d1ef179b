"""Free memory of this host, and of the devices of ranks."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CONTEXT_BYTES = 700_000_000
"""Of a GPU's memory, for the CUDA context and kernels of a process."""
OWN_GROUPS, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
FILES_V2 = ("memory.max", "memory.current", "inactive_file")
"""In the folder of a cgroup: its limit, what it uses, and the line of memory.stat with what it could give back."""


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
    """Return the free memory in bytes: that of the system, within the limits of this process's cgroups."""
    limits = [_free_in_system(), *_free_in_groups()]
    return min((limit for limit in limits if limit is not None), default=None)


def _free_in_groups() -> Iterator[int]:
    """Yield what each cgroup of this process leaves to it: of a container, a job of Slurm, a service.

    A limit of a group holds for the groups in it, so that all around the own one count. In a container that has no
    namespace for them, the outermost folder is that of its own group.
    """
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (CGROUPS / "memory", FILES_V1) if controllers else (CGROUPS, FILES_V2)
        own = root / path.lstrip("/")
        for folder in (own, *own.parents[: len(own.parts) - len(root.parts)]):
            with suppress(OSError, ValueError):  # no such group here, or no limit: "max"
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                cache = re.search(rf"^{names[2]} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                yield max(0, limit - used + (int(cache.group(1)) if cache else 0))


def _free_in_system() -> int | None:
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    match = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())
    return int(match.group(1)) * 1024 if match else None
