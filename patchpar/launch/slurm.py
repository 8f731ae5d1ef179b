"""Tasks that Slurm's srun has started without torchrun: each would start all workers, and generate the same."""

import os

from patchpar.errors import PlanError
from patchpar.launch.devices import count_named

TASKS, TASK = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"


def check_task(devices: object) -> None:
    """Raise PlanError in one of several tasks of a job step, unless `devices`, see `resolve_devices`, name one device.

    Processes that are ranks of torchrun do not ask.
    """
    tasks = os.environ.get(TASKS, "")
    if not tasks.isdecimal() or int(tasks) < 2 or str(devices) == "cpu" or count_named(devices) == 1:
        return
    raise PlanError(
        f"this is task {os.environ.get(TASK, '?')} of {tasks} that srun has started, and each would start workers for "
        f"all devices: start one task (srun --ntasks 1), or torchrun in one task for each node. Tasks that generate "
        f"images of their own name one device, as devices='cuda:0', or run without {TASKS} in their environment"
    )
