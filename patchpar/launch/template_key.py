"""All that a new process takes over from the process that starts it: what workers of one template have in common."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from patchpar.launch.started_process import ProcessRequest
from patchpar.launch.template_process import VARY

OWN = Path("/proc/thread-self")
STATUS = re.compile(
    r"^(?:Umask|Uid|Gid|Groups|Sig(?:Blk|Ign)|Cap\w+|NoNewPrivs|Seccomp|Cpus_allowed|Mems_allowed):.*$", re.MULTILINE
)
FILES = ("limits", "cgroup", "oom_score_adj")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateKey:
    """What a template has taken over. A worker for which any of this is different needs another template.

    `folder`: the working directory (device and inode), if modules are looked for in it. `settings`: user, limits,
    cores, ignored signals, and the other properties of this thread that the kernel hands on.
    """

    executable: str
    environment: frozenset[tuple[str, str]]
    path: tuple[str, ...]
    folder: tuple[int, int] | None
    settings: tuple[str, ...]

    @classmethod
    def of(cls, request: ProcessRequest) -> "TemplateKey":
        """Return the key of the template for a worker that this thread starts now."""
        is_relative = not all(map(os.path.isabs, request.path))
        here = Path().stat() if is_relative else None
        return cls(
            executable=sys.executable,
            environment=frozenset(item for item in request.environment.items() if item[0] not in VARY),
            path=request.path,
            folder=(here.st_dev, here.st_ino) if here is not None else None,
            settings=_settings(),
        )


def _settings() -> tuple[str, ...]:
    status = STATUS.findall((OWN / "status").read_text())
    found = [(OWN / name).read_text() for name in FILES if (OWN / name).exists()]
    return (*status, *found, str(os.getpriority(os.PRIO_PROCESS, 0)))
