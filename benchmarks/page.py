"""A page of figures that a benchmark has made: Markdown for readers, and the same as JSON for programs beside it.

python -m benchmarks.page docs/figures/*.md      # the JSON of pages that are there
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BETWEEN_CELLS = re.compile(r"(?<!\\)\|")


def publish(lines: Iterable[str], file: Path | None) -> None:
    """Write the lines to `file`, if there is one, and print them."""
    text = "\n".join(lines) + "\n"
    if file is not None:
        write_page(text, file)
    print(text)


def write_page(text: str, file: Path) -> None:
    """A page, and what stands in it as `<page>.json`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.with_suffix(".json").write_text(json.dumps(contents(text), indent=1, ensure_ascii=False) + "\n")


def priority() -> str:
    """A sentence for the page, if this process and its ranks go before all others that the machine runs."""
    policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
    is_first = policy is not None and policy in (os.SCHED_FIFO, os.SCHED_RR)
    return " Measured at the priority of real time, before all other processes of the machine." if is_first else ""


def write_section(opening: str, heading: str, body: str, file: Path) -> None:
    """A page that is measured in pieces: `opening`, and its sections, of which this one is written anew or added."""
    found = {**sections_of(file), heading: body.strip()}
    write_page(opening + "".join(f"\n## {name}\n\n{text}\n" for name, text in found.items()), file)


def sections_of(file: Path) -> dict[str, str]:
    """What stands under each heading of a page, which need not be there."""
    text = file.read_text() if file.exists() else ""
    found = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return {heading: body.strip() for heading, body in found}


def publish_section(opening: str, heading: str, lines: Iterable[str], file: Path | None) -> None:
    """Print a section, each line as soon as it is measured, and write it to `file`, if there is one.

    The other sections of the file stay as they are: a run that is cut off, or of one section, loses none.
    """
    print(f"\n## {heading}\n", flush=True)
    found = []
    for line in lines:
        print(line, flush=True)
        found.append(line)
    if file is not None:
        write_section(opening, heading, "\n".join(found), file)


def contents(text: str) -> list[dict[str, Any]]:
    """The sections of a page: `heading` ("" for what stands before the first), `text` (lines), `tables` (of rows).

    A row has a cell for each column, by its name; cells stay the text that they are.
    """
    sections: list[dict[str, Any]] = [{"heading": "", "text": [], "tables": []}]
    table: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        if table:
            sections[-1]["tables"].append(_rows(table))
            table = []
        if line.startswith("## "):
            sections.append({"heading": line[3:], "text": [], "tables": []})
        elif line:
            sections[-1]["text"].append(line)
    return sections


def _rows(lines: Sequence[str]) -> list[dict[str, str]]:
    names, _, *cells = ([_unescaped(cell) for cell in re.split(BETWEEN_CELLS, line.strip())[1:-1]] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in cells]


def _unescaped(cell: str) -> str:
    return cell.strip().replace("\\|", "|")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the JSON of pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, help="Markdown files")
    pages = parser.parse_args(arguments).pages
    if absent := [str(page) for page in pages if not page.is_file()]:
        parser.error(f"there is no {', no '.join(absent)}")
    for page in pages:
        write_page(page.read_text(), page)


if __name__ == "__main__":
    main()
