"""What a run of `benchmarks.quality` measures, one line of JSON per image, so that an interrupted run goes on.

A `Setting` is how images are made, a `Method` how the work is shared, a `Record` what one image came to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from patchpar.strategies import parse_strategy

LATER = {"versions"}
"""Fields that older lines do not have."""
Key = tuple["Setting", "Method", int, int]
"""Setting, method, ranks, caption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How images are made. `height`, `width` in pixels; caption i has the seed `seed` + i; `model` is a hash."""

    model: str
    height: int
    width: int
    steps: int
    scheduler: str
    guidance: float
    seed: int

    def __str__(self) -> str:
        return f"{self.height} x {self.width} pixels, {self.steps} steps, {self.scheduler}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A strategy with all its options, and whether its exchange works: "on", "off" or "frozen"."""

    strategy: str
    exchange: str = "on"


ONE_PROCESS = Method(strategy="one process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A method as it was asked for. `text` is the strategy for a plan, `label` what tables call it."""

    label: str
    text: str
    method: Method

    @classmethod
    def parse(cls, label: str) -> Named:
        """Read "displaced:warmup_steps=1", or a control: "naive", or "frozen" with options of displaced.

        Raises PlanError naming what is valid.
        """
        name, _, options = label.partition(":")
        text = {"naive": "exact", "frozen": "displaced"}.get(name, name) + (f":{options}" if options else "")
        exchange = {"naive": "off", "frozen": "frozen"}.get(name, "on")
        return cls(label=label, text=text, method=Method(strategy=repr(parse_strategy(text)), exchange=exchange))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One image against that of one process.

    `lpips`: None where it was not measured. `right`: both sides of the image show what its caption says.
    `bytes_per_step`: the most that a rank sent in a step, on average over the steps, for this one of the `batch`
    images generated together; `stale_step_bytes`: the same of steps that used values of the last one, None without any.
    `seconds_waited`: by the rank that waited most, in a step of the batch. `exact_steps`: steps without old values.
    `versions`: of torch, diffusers and patchpar, which decide nothing: empty in lines that are older than this field.
    """

    setting: Setting
    method: Method
    label: str
    ranks: int
    caption: int
    psnr_db: float
    ssim: float
    lpips: float | None
    right: bool
    bytes_per_step: float
    stale_step_bytes: float | None
    seconds_waited: float
    exact_steps: int
    batch: int
    cores: int
    versions: str = ""

    @property
    def key(self) -> Key:
        """What the figures are of."""
        return self.setting, self.method, self.ranks, self.caption


class Records:
    """The file of lines. The last line of a key counts; half a line at the end, of a run cut short, does not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[Key, Record] = {}
        for number, line in enumerate(self._whole_lines(), 1):
            record = self._read(line, number)
            self._found[record.key] = record

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: Key) -> Record | None:
        """What is known of this key."""
        return self._found.get(key)

    def all(self) -> list[Record]:
        """Every record, in the order of their first lines."""
        return list(self._found.values())

    def add(self, records: Iterable[Record]) -> None:
        """Write them to the end of the file, now."""
        records = list(records)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.truncate(self._whole_size())
            file.write("".join(json.dumps(asdict(record)) + "\n" for record in records).encode())
        self._found.update({record.key: record for record in records})

    def _whole_size(self) -> int:
        return self.path.read_bytes().rfind(b"\n") + 1

    def _whole_lines(self) -> list[str]:
        return self.path.read_bytes()[: self._whole_size()].decode().splitlines() if self.path.exists() else []

    def _read(self, line: str, number: int) -> Record:
        names = {field.name for field in fields(Record)}
        try:
            values = json.loads(line)
            setting, method = Setting(**values.pop("setting")), Method(**values.pop("method"))
            if set(values) | LATER != names - {"setting", "method"}:
                raise KeyError(f"its names are {', '.join(values)}")
            return Record(setting=setting, method=method, **values)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number} of {self.path} is no record ({error}): move the file away") from error
