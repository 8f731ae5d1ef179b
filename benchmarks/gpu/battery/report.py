"""The page of the battery, from what is finished so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.battery.journal import Journal
from benchmarks.gpu.battery.parts import Part

NOT_A_GPU = (
    "**This is no measurement of a GPU.** The battery was run on a CPU with tiny models, to see that it works. "
    "Its figures mean nothing."
)


def lines(parts: Sequence[Part], journal: Journal, device: str, machine: str) -> Iterator[str]:
    """Yield the page. `machine`: its GPUs and software."""
    yield "# On GPUs"
    yield ""
    yield from ([NOT_A_GPU] if device == "cpu" else [f"`python -m benchmarks.gpu.battery` on {machine}."])
    for part in parts:
        outcome = journal.latest(part.name)
        yield ""
        yield f"## {part.title}"
        yield ""
        if outcome is None:
            yield "Not run yet. Run the battery again; it goes on here."
        elif not outcome.ok:
            how = f"Cut off ({outcome.cut_off})" if outcome.cut_off else "Failed"
            yield f"{how} after {outcome.seconds:.0f} s:"
            yield ""
            yield from (f"    {line}" for line in outcome.error.splitlines())
        if outcome is not None and outcome.rows:
            if not outcome.ok:
                yield ""
            yield f"{part.explanation} Took {outcome.seconds:.0f} s."
            yield ""
            yield from table(outcome.rows)


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table with a column for each name that any row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |"


def _cell(value: Any) -> str:
    text = str(value)
    if isinstance(value, float):
        text = f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return text.replace("|", "\\|").replace("\n", " ")
