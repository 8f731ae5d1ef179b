"""Measurements of this machine, kept in a file for each set of devices. Those of another version are not found.

Nor are those of another machine, whose devices have the same names in torch: a home folder may be that of several.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.devices import available_cores, hardware
from patchpar.plan.dataclass_json import decoded
from patchpar.plan.replay.measured_machine import MeasuredMachine
from patchpar.shard.verification_cache import VerificationCache

FOLDER, MACHINE = "machines", "machine"


@dataclass(frozen=True, slots=True)
class KeptMachines:
    """Measurements in `files`."""

    files: VerificationCache

    @classmethod
    def in_home(cls) -> "KeptMachines":
        """Return those of this user."""
        return cls(VerificationCache.in_home(FOLDER))

    def find(self, devices: Sequence[str]) -> MeasuredMachine | None:
        """Return the measurement of these devices; None if there is none of this version."""
        return self.files.find(self.files.key(_facts(devices)), MACHINE, lambda found: decoded(MeasuredMachine, found))

    def of(self, devices: Sequence[str]) -> MeasuredMachine:
        """Return the measurement of these devices. Raises PlanError if there is none of this version."""
        found = self.find(devices)
        if found is None:
            raise PlanError(
                f"{', '.join(devices)} of this machine: not measured by this version of patchpar: run patchpar tune "
                f"--devices {devices_argument(devices)}, or name a machine such as 8xH100-nvlink"
            )
        return found

    def keep(self, devices: Sequence[str], machine: MeasuredMachine) -> None:
        """Keep a measurement, in the place of the last one of these devices."""
        facts = _facts(devices)
        self.files.remember(self.files.key(facts), facts, machine=asdict(machine))

    def scale(self, devices: Sequence[str], factor: float) -> None:
        """Multiply the seconds of kernels of a kept measurement, which real calls have shown to be wrong."""
        found = self.find(devices)
        if found is not None:
            self.keep(devices, found.scaled(factor))


def _facts(devices: Sequence[str]) -> dict[str, Any]:
    return {"devices": list(devices), "hardware": hardware(), "cores": available_cores()}


def devices_argument(devices: Sequence[str]) -> str:
    """Return the value of --devices for these devices."""
    return f"cpu:{len(devices)}" if set(devices) == {"cpu"} else ",".join(devices)
