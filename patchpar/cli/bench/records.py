"""What `patchpar bench` measures: one line of JSON per image, so that an interrupted run goes on where it ended."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from patchpar.cli.output_files import full_disk_named
from patchpar.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSetting:
    """How the images of a table are generated. `model`: name and a digest of its files. Sizes in pixels; None: its own.

    `scheduler`: class of diffusers; `libraries`: versions that images depend on.
    """

    model: str
    dtype: str
    scheduler: str
    height: int | None
    width: int | None
    steps: int
    guidance_scale: float | None
    negative_prompt: str | None
    loras: tuple[str, ...]
    libraries: str

    @property
    def title(self) -> str:
        """Return it as the heading of a table."""
        size = "" if self.height is None and self.width is None else f", {self.height or '-'} x {self.width or '-'}"
        return f"{self.steps} steps, {self.scheduler.removesuffix('Scheduler')}{size}"


class BenchKey(NamedTuple):
    """One image: its setting, prompt and seed, the plan, and the machine: devices by name, and cores."""

    setting: BenchSetting
    prompt: str
    seed: int
    plan: str
    machine: str


KEY_NAMES = BenchKey._fields[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """One image against that of one process.

    `psnr_db`: infinite for equal images; `lpips`: None where it was not measured. `bytes_per_step`: of the rank that
    sends most, without the VAE; `seconds`: of the call; `waited`: of the rank that waits most, in the whole call;
    `single_seconds`: of one process's call. `exact_steps`: None if the plan never uses stale values.
    """

    key: BenchKey
    devices: tuple[str, ...]
    psnr_db: float
    ssim: float
    lpips: float | None
    bytes_per_step: int
    seconds: float
    single_seconds: float
    waited: float
    steps: int
    exact_steps: int | None

    def as_json(self) -> str:
        """Return one line. JSON has no infinity, so that it is written as text."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        setting, *rest = values.pop("key")
        values["psnr_db"] = "inf" if math.isinf(self.psnr_db) else self.psnr_db
        return json.dumps({"setting": asdict(setting), **dict(zip(KEY_NAMES, rest, strict=True)), **values})

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> BenchRecord:
        """Return the record of a line's values. Raises ValueError, KeyError and TypeError for anything else."""
        setting = values.pop("setting")
        setting["loras"] = tuple(setting["loras"])
        key = BenchKey(BenchSetting(**setting), *(values.pop(name) for name in KEY_NAMES))
        values["psnr_db"], values["devices"] = float(values["psnr_db"]), tuple(values["devices"])
        return cls(key=key, **values)


class RecordFile:
    """A file of records, which grows by one line at a time; the last line of a key counts.

    `outdated`: how many lines are of a version that did not write down the machine. They count for nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.outdated = path, 0
        self.records = {record.key: record for record in self._read()}

    def add(self, record: BenchRecord) -> None:
        """Append a record. Raises PatchparError where the disk is full, and OSError where it cannot be written."""
        with full_disk_named(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(record.as_json() + "\n")
        self.records[record.key] = record

    def _read(self) -> Iterator[BenchRecord]:
        """Yield the records of the file. A last line without an end is of a run that was killed, and is cut off."""
        if not self.path.exists():
            return
        text = self.path.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        if rest:
            self.path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
        for number, line in enumerate(whole.split("\n") if whole else (), 1):
            try:
                values = json.loads(line)
                if _lacks_the_machine(values):
                    self.outdated += 1
                else:
                    yield BenchRecord.from_values(values)
            except (ValueError, KeyError, TypeError) as error:
                raise PlanError(
                    f"{self.path}, line {number}, is no record of this version of patchpar bench ({error!r}): "
                    "name another folder with --output, or remove the file"
                ) from error


def _lacks_the_machine(values: Any) -> bool:
    """Whether these are of a record as version 0.2.0 wrote it: whatever machine it is of, it is measured anew."""
    names = {"setting", *KEY_NAMES, *(field.name for field in fields(BenchRecord))} - {"key", "machine"}
    return isinstance(values, dict) and set(values) == names
