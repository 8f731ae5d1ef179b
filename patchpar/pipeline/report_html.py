"""Statistics of a call as HTML, for notebooks: a bar for each rank, with the part of the call that it waited.

Text is escaped, and there is no script and no address in it, so that a notebook shows it without trust.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 240  # of a bar, in pixels
COMPUTING, WAITING = "#4c78a8", "#e45756"
HEADS = ("rank", "device", "computing, waiting", "waited", "sent", "stale values held")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank of the table. `waited`: seconds; `sent` and `held`: texts with a unit."""

    rank: int
    device: str
    waited: float
    sent: str
    held: str


def html_of_run(title: str, seconds: float, rows: Sequence[RankRow]) -> str:
    """Return a table of the ranks of a call that took `seconds`, under `title`."""
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    body = "".join(_html_of(row, seconds) for row in rows)
    return f"<p>{escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_of(row: RankRow, seconds: float) -> str:
    part = min(row.waited / seconds, 1.0) if seconds > 0 else 0.0
    waited = f"{row.waited:.2f} s ({part:.0%})"
    cells = (str(row.rank), escape(row.device), _bar(part), waited, escape(row.sent), escape(row.held))
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _bar(waiting: float) -> str:
    """Return a bar whose right part is the time spent waiting, 0 to 1."""
    right = round(WIDTH * waiting)
    parts = "".join(
        f'<span style="display:inline-block;height:0.9em;width:{width}px;background:{color}"></span>'
        for width, color in ((WIDTH - right, COMPUTING), (right, WAITING))
    )
    return f'<span role="img" aria-label="{waiting:.0%} waiting" style="white-space:nowrap">{parts}</span>'
