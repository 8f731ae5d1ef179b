"""Measurements of this machine, kept in a file for each set of devices. Those of another version are not found.

Nor are those of another machine, whose devices have the same names in torch: a home folder may be that of several.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
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

    def check_can_keep(self) -> None:
        """Raise PlanError if no measurement can be kept."""
        with self._refusing():
            self.files.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.files.folder):
                pass

    def keep(self, devices: Sequence[str], machine: MeasuredMachine) -> None:
        """Keep a measurement, in the place of the last one of these devices. Raises PlanError if it cannot be."""
        facts = _facts(devices)
        with self._refusing():
            self.files.store(self.files.key(facts), facts, machine=asdict(machine))

    def scale(self, devices: Sequence[str], factor: float) -> None:
        """Multiply the seconds of kernels of a kept measurement, which real calls have shown to be wrong.

        It stays as it is where it cannot be written: the calls themselves have not failed.
        """
        found = self.find(devices)
        if found is not None:
            with contextlib.suppress(PlanError):
                self.keep(devices, found.scaled(factor))

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PlanError(
                f"cannot keep figures in {self.files.folder}: {error.strerror}; they are kept in the home folder: make "
                "room there, or set HOME to a folder that can be written, here and for calls that use them"
            ) from error


def _facts(devices: Sequence[str]) -> dict[str, Any]:
    return {"devices": list(devices), "hardware": hardware(), "cores": available_cores()}


def devices_argument(devices: Sequence[str]) -> str:
    """Return the value of --devices for these devices."""
    return f"cpu:{len(devices)}" if set(devices) == {"cpu"} else ",".join(devices)
