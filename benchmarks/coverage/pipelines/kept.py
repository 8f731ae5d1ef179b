"""Reports in a folder, one file each, so that an examination that was interrupted goes on where it was."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from .report import Report
from .trial import Outcome


class KeptReports:
    """Reports in `folder`, by the name of their pipeline; without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> Report | None:
        """The report of an earlier run; None without one."""
        if self._folder is None or not self._path(name).is_file():
            return None
        facts = json.loads(self._path(name).read_text())
        outcomes = tuple(Outcome(**each) for each in facts.pop("outcomes"))
        return Report(outcomes=outcomes, **facts)

    def write(self, report: Report) -> Report:
        """Keep it, and give it back."""
        if self._folder is not None:
            self._path(report.name).write_text(json.dumps(asdict(report)))
        return report

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.json"
