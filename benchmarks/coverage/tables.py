"""Tables of Markdown, written and read back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows)]


def cells_under(text: str, header: Sequence[str]) -> list[list[str]]:
    """The cells of the table with this header. Raises ValueError where there is none, or a line has too few."""
    lines = text.splitlines()
    if _line(header) not in lines:
        raise ValueError(f"no table of {', '.join(header)}")
    found = []
    for line in lines[lines.index(_line(header)) + 2 :]:
        if not line.startswith("| "):
            break
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if len(cells) != len(header):
            raise ValueError(f"{len(cells)} cells where there should be {len(header)}: {line}")
        found.append(cells)
    return found


def power(limit: float) -> str:
    """A power of ten, as 1e-5."""
    return f"{limit:.0e}".replace("e-0", "e-")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
