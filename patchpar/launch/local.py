"""Worker processes of this process, one per device. This process controls them and is not a rank."""

import logging
import sys
from collections import Counter
from collections.abc import Sequence

from patchpar.errors import LaunchError
from patchpar.launch.accelerators import is_accelerator
from patchpar.launch.devices import RAY
from patchpar.launch.executor import check_deadline
from patchpar.launch.start_method import AUTO, resolve_start_method
from patchpar.launch.worker_executor import WorkerExecutor
from patchpar.launch.worker_start import LocalStarter, WorkerPoolSpec

log = logging.getLogger(__name__)


class LocalExecutor(WorkerExecutor):
    """An Executor whose ranks are worker processes on this machine.

    `devices`: one torch device name per rank. `engine`: "package.module:Class". `deadline`: seconds without progress
    that a rank may take during a call, see `hang_detection`. `start_timeout`: seconds for the workers to import modules
    and connect. `preload`: modules that the workers import while they start. `start_method`: "forkserver" (workers are
    forked from a template process that has imported these modules), "spawn" (each is a new Python process), or "auto".
    `one_by_one`: a worker that is lost is replaced alone, and the others stay, with all they hold: for engines whose
    constructor exchanges nothing, and whose calls with `replay` do so only if they say `divides`. Otherwise all workers
    are started anew. `has_group`: False for engines that never use torch's default group, which then is not formed.
    Raises LaunchError.
    """

    def __init__(  # noqa: PLR0913 - each is a setting of its own, by name
        self,
        devices: Sequence[str],
        engine: str,
        *,
        deadline: float = 60.0,
        start_timeout: float = 600.0,
        preload: Sequence[str] = (),
        start_method: str = AUTO,
        one_by_one: bool = False,
        has_group: bool = True,
    ) -> None:
        if sys.platform == "win32":
            raise LaunchError("worker processes need Linux or macOS; on Windows use one device")
        if not devices:
            raise LaunchError("at least one device is needed")
        if RAY in devices:
            raise LaunchError(f"devices='ray:{len(devices)}': this needs devices of this machine, such as 'cpu:2'")
        devices = tuple(devices)
        for name, ranks in Counter(devices).items():
            if ranks > 1 and is_accelerator(name):
                log.warning("%d ranks share %s, to try a plan: this is slower than one rank on it", ranks, name)
        self.start_method = resolve_start_method(start_method, devices)
        spec = WorkerPoolSpec(
            devices=devices,
            engine=engine,
            deadline=check_deadline("deadline", deadline),
            start_timeout=check_deadline("start_timeout", start_timeout),
            preload=tuple(preload),
            start_method=self.start_method.name,
            one_by_one=one_by_one,
            has_group=has_group,
        )
        super().__init__(spec, LocalStarter(spec))
