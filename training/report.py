"""Measured figures: kept as JSON beside the sample sheet, shown as a table in the document."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "embedded-model.md"
END = "<!-- end of figures -->"
COLUMNS = {
    "captions": "captions",
    "scene": "both sides right",
    "night": "of them at night",
    "single": "no object twice",
    "kind": "kind",
    "color": "colour",
    "empty": "empty side left empty",
    "terrain": "terrain",
    "time": "time of day",
    "classifier": "classifier on renders",
    "counter": "counter on renders",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """Where the figures of a model go: their file, the document, and the found_begin in it after which the table is."""

    figures: Path
    document: Path
    begin: str


def report_files(model: Path) -> ReportFiles:
    """The place of a packaged model's figures, by the name of its folder."""
    name = model.resolve().name
    begin = f"<!-- figures of {name}: written by training.evaluate -->"
    return ReportFiles(figures=ROOT / "assets" / "figures" / f"{name}.json", document=DOCUMENT, begin=begin)


def update_figures(size: str, figures: dict, path: Path) -> None:
    """Replace the entry of one size, keep the others."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[size] = figures
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def table(figures: dict) -> str:
    """The figures as a Markdown table, one row per size."""
    rows = [["size", "steps", "guidance", "precision", *COLUMNS.values()]]
    rows.append(["---"] * len(rows[0]))
    for size, entry in figures.items():
        parts = [_cell(name, entry.get(name)) for name in COLUMNS]
        rows.append([size, str(entry["steps"]), str(entry["guidance"]), entry["dtype"], *parts])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(name: str, value: float | None) -> str:
    """Empty where this size was measured before the column existed."""
    if value is None:
        return ""
    return str(value) if name == "captions" else f"{100 * value:.0f} %"


def update_document(files: ReportFiles) -> None:
    """Put the table between its marks. Raises ValueError where the document has no marks."""
    before, found_begin, rest = files.document.read_text().partition(files.begin)
    _, end, after = rest.partition(END)
    if not found_begin or not end:
        raise ValueError(
            f"{files.document} has no place for figures: it needs the lines '{files.begin}' and '{END}' after it"
        )
    found = table(json.loads(files.figures.read_text()))
    files.document.write_text(f"{before}{found_begin}\n{found}\n{end}{after}")
