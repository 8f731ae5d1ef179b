"""Tasks that Slurm's srun has started without torchrun: each would start all workers, and generate the same."""

import os
from typing import Protocol

from patchpar.errors import PlanError
from patchpar.launch.devices import Devices, count_named, devices_of_plan, resolve_devices

TASKS, TASK = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"


class SizedPlan(Protocol):
    """A plan of a number of devices, which says with `str` what the user has written."""

    @property
    def world_size(self) -> int:
        """How many."""


def resolve_devices_of_task(devices: object, plan: SizedPlan | None = None) -> Devices:
    """Return the devices of a pipeline that starts workers, see `resolve_devices`; "auto": as many as the plan takes.

    Raises PlanError, also in one of several tasks of a job step unless `devices` name one device. Processes that are
    ranks of torchrun do not ask.
    """
    counted = plan if devices == "auto" else None
    _refuse_several_tasks(devices if counted is None else counted.world_size)
    return resolve_devices(devices) if counted is None else devices_of_plan(counted, counted.world_size)


def _refuse_several_tasks(devices: object) -> None:
    tasks = os.environ.get(TASKS, "")
    if not tasks.isdecimal() or int(tasks) < 2 or str(devices) == "cpu" or count_named(devices) == 1:
        return
    raise PlanError(
        f"this is task {os.environ.get(TASK, '?')} of {tasks} that srun has started, and each would start workers for "
        f"all devices: start one task (srun --ntasks 1), or torchrun in one task for each node. Tasks that generate "
        f"images of their own name one device, as devices='cuda:0', or run without {TASKS} in their environment"
    )
