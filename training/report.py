"""Measured figures: kept as JSON beside the sample sheet, shown as a table in the document."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "assets" / "figures" / "embedded-model.json"
DOCUMENT = ROOT / "docs" / "embedded-model.md"
BEGIN, END = "<!-- figures: written by training.evaluate -->", "<!-- end of figures -->"
COLUMNS = {
    "captions": "captions",
    "scene": "both sides right",
    "kind": "kind",
    "color": "colour",
    "empty": "empty side left empty",
    "terrain": "terrain",
    "time": "time of day",
    "classifier": "classifier on renders",
}


def update_figures(size: str, figures: dict, path: Path = FIGURES) -> None:
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
        shares = [str(entry[name]) if name == "captions" else f"{100 * entry[name]:.0f} %" for name in COLUMNS]
        rows.append([size, str(entry["steps"]), str(entry["guidance"]), entry["dtype"], *shares])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def update_document(document: Path = DOCUMENT, path: Path = FIGURES) -> None:
    """Put the table between its marks. Raises ValueError where the document has no marks."""
    text = document.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{document} has no place for figures: it needs the lines '{BEGIN}' and '{END}'")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    document.write_text(f"{before}{BEGIN}\n{table(json.loads(path.read_text()))}\n{END}{after}")
