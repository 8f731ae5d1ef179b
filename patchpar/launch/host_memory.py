"""Free memory of this host."""

import re
from pathlib import Path


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
