"""Pages of figures that are measured in pieces."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.page import write_section

OPENING = "# Things\n\nMeasured.\n"


def table(value: str) -> str:
    """A table of one cell."""
    return f"| size |\n|---|\n| {value} |"


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "things.md"
    for heading, value in (("small", "1"), ("large", "8"), ("small", "2")):
        write_section(OPENING, heading, table(value), file)
    sections = json.loads(file.with_suffix(".json").read_text())
    assert [each["heading"] for each in sections] == ["", "small", "large"]
    assert [each["tables"][0][0]["size"] for each in sections[1:]] == ["2", "8"]
    assert file.read_text() == f"{OPENING}\n## small\n\n{table('2')}\n\n## large\n\n{table('8')}\n"
