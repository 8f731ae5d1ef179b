"""All template processes of this process.

A template runs as long as workers of it do, and for IDLE_SECONDS without any; it ends with this process, whatever
ends that. If it is killed, its workers go on, and the next worker is forked from a new one.
"""

import contextlib
import threading

from patchpar.errors import LaunchError
from patchpar.launch.fork_guard import change_in_children, no_fork
from patchpar.launch.fork_request import TemplateEnded
from patchpar.launch.started_process import ProcessRequest
from patchpar.launch.template import ForkedProcess, Template
from patchpar.launch.template_key import TemplateKey

IDLE_SECONDS = 60  # importing again takes 5 s of processor time, staying takes 0.3 GB
IDLE_TEMPLATES = 2


class Templates:
    """The templates of this process: one for each TemplateKey, and not many that have no workers."""

    def __init__(self, idle_seconds: int = IDLE_SECONDS, idle_templates: int = IDLE_TEMPLATES) -> None:
        self._idle_seconds, self._idle_templates = idle_seconds, idle_templates
        self._lock = threading.RLock()
        self._found: dict[TemplateKey, Template] = {}
        change_in_children(self)

    def fork(self, request: ProcessRequest) -> ForkedProcess:
        """Start a worker from the template of its key, which is started if there is none. Raises LaunchError."""
        with self._lock:
            try:
                key = TemplateKey.of(request)
                with contextlib.suppress(TemplateEnded):  # since it was used last
                    return self._of(key, request).fork(request)
                del self._found[key]
                return self._of(key, request).fork(request)
            except (TemplateEnded, OSError) as error:
                raise LaunchError(f"cannot start a worker from a template process: {error}") from error

    def _of(self, key: TemplateKey, request: ProcessRequest) -> Template:
        template = self._found.pop(key, None)
        if template is None or template.is_retired:
            with no_fork():
                template = Template(request.environment, self._idle_seconds)
        self._found[key] = template  # the last one: the others have been used before it
        unused = [known for known, other in self._found.items() if not other.is_used and other is not template]
        for known in unused[: max(0, len(unused) - self._idle_templates)]:
            self._found.pop(known).retire()
        return template

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        self._found = {}


TEMPLATES = Templates()
"""Of the whole process, since what has been imported serves every pool of it."""


def fork_worker(request: ProcessRequest) -> ForkedProcess:
    """Start a worker by fork. The Starter of start method "forkserver"."""
    return TEMPLATES.fork(request)
