"""Finished parts, a line of JSON each, so that a run that was cut off goes on with the next."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a part: rows of its table, or what it said when it failed. `seconds`: what it took.

    `cut_off`: by what, if it did not end by itself.
    """

    part: str
    ok: bool
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    cut_off: str = ""


class Journal:
    """Outcomes in `file`. Those of another `key` (GPUs, torch, sources) are not looked at."""

    def __init__(self, file: Path, *, key: str) -> None:
        self._file, self._key = file, key

    def add(self, outcome: Outcome) -> None:
        """Write an outcome to the end of the file."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps({"key": self._key, **asdict(outcome)}) + "\n")

    def latest(self, part: str) -> Outcome | None:
        """Return the last outcome of a part. A line that was not written to its end is as if it were not there."""
        found = None
        for line in self._file.read_text().splitlines() if self._file.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry.pop("key") == self._key and entry["part"] == part:
                found = Outcome(**entry)
        return found

    def passed(self, part: str) -> bool:
        """Whether a part need not be run again."""
        outcome = self.latest(part)
        return outcome is not None and outcome.ok

    def clear(self) -> None:
        """Forget everything."""
        self._file.unlink(missing_ok=True)
