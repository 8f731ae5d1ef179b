"""A machine from a text: this one as it was measured, or one that is described by a name."""

from patchpar.launch.devices import resolve_devices
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.measured_machine import MeasuredMachine

LOCAL = "local"


def machine_of(text: str) -> Machine | MeasuredMachine:
    """Return the machine of "8xH100-nvlink", or of "local" and "local:cpu:2", which `patchpar tune` has measured.

    Raises PlanError for a name that cannot be read, and for devices that were not measured.
    """
    name, _, devices = text.strip().partition(":")
    if name != LOCAL:
        return Machine.parse(text)
    return KeptMachines.in_home().of(resolve_devices(devices or "auto").names)
