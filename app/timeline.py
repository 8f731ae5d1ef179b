"""Timeline of the ranks as SVG: the fraction of each interval spent computing, sending and waiting.

rank 0   ████▓▓████░░███   one lane for each rank, one mark for each step
rank 1   ███░░█████▓▓███
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from patchpar import Run
from patchpar.comm.trace import RankTrace, TraceEvent

from .html import SCROLLING

COLUMNS = 480
WIDTH, LANE, GAP, LEFT, TOP = 960, 56, 14, 64, 22  # of the diagram, in pixels
KINDS = ("compute", "check", "send", "wait")  # from below
LABELS = {"compute": "computing", "check": "verification (first use)", "send": "sending", "wait": "waiting"}


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A time interval, in seconds since the epoch."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


def traces_of(run: Run | None) -> list[RankTrace]:
    """The recorded traces of a run."""
    return [] if run is None else [rank.trace for rank in run.ranks if rank.trace is not None]


def window_of(traces: Sequence[RankTrace], first: int, last: int) -> TimeWindow:
    """Steps `first` to `last`; with the first and the last step also the time before and after."""
    starts = [trace.epoch + event.start for trace in traces for event in trace.events]
    ends = [trace.epoch + event.start + event.seconds for trace in traces for event in trace.events]
    steps = _steps(traces)
    if not starts:
        return TimeWindow(0.0, 1.0)
    begin = min(starts) if first <= 0 or not steps else steps[min(first, len(steps) - 1)].start
    end = max(ends) if last >= len(steps) - 1 or not steps else steps[max(last, 0)].end
    return TimeWindow(begin, max(end, begin + 1e-6))


def _steps(traces: Sequence[RankTrace]) -> list[TimeWindow]:
    """The steps of the first rank."""
    if not traces:
        return []
    found = [event for event in traces[0].events if event.what == "step"]
    return [TimeWindow(traces[0].epoch + step.start, traces[0].epoch + step.start + step.seconds) for step in found]


def count_steps(traces: Sequence[RankTrace]) -> int:
    """Number of recorded steps."""
    return len(_steps(traces))


def time_fractions(trace: RankTrace, window: TimeWindow, columns: int = COLUMNS) -> dict[str, Any]:
    """For each kind the fraction (0..1) of each column of the window, shape (columns,)."""
    found = {kind: np.zeros(columns) for kind in KINDS}
    inside = np.zeros(columns)
    for event in trace.events:
        if event.what in ("call", "vae"):
            _add(found["compute"], event, trace.epoch, window)
        elif event.what in found:
            _add(found[event.what], event, trace.epoch, window)
    for kind in KINDS[1:]:
        inside += found[kind]
    found["compute"] = np.clip(np.minimum(found["compute"], 1.0) - inside, 0.0, 1.0)
    return found


def _add(columns: Any, event: TraceEvent, epoch: float, window: TimeWindow) -> None:
    """Spread an event over the columns that it covers."""
    scale = len(columns) / window.seconds
    begin = (epoch + event.start - window.start) * scale
    end = begin + event.seconds * scale
    if end <= 0 or begin >= len(columns):
        return
    begin, end = max(begin, 0.0), min(end, float(len(columns)))
    first, last = int(begin), min(int(end), len(columns) - 1)
    if first == last:
        columns[first] += end - begin
        return
    columns[first] += first + 1 - begin
    columns[first + 1 : last] += 1.0
    columns[last] += end - last


def to_svg(traces: Sequence[RankTrace], first: int, last: int) -> str:
    """The lanes of all ranks as SVG. The style sheet of the page gives the colours of both colour schemes."""
    window = window_of(traces, first, last)
    height = TOP + len(traces) * (LANE + GAP) + 24
    lanes = "".join(_lane(trace, window, TOP + number * (LANE + GAP)) for number, trace in enumerate(traces))
    label = f"what {len(traces)} ranks did in {window.seconds:.2f} seconds"
    return (
        f'{SCROLLING}<svg class="timeline" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        f"{_step_lines(traces, window, height)}{lanes}{_axis(window, height)}</svg></div>{_legend()}"
    )


def _lane(trace: RankTrace, window: TimeWindow, top: int) -> str:
    parts = [
        f'<text x="0" y="{top + LANE / 2 - 3}">rank {trace.rank}</text>'
        f'<text x="0" y="{top + LANE / 2 + 11}" class="small">{escape(trace.device)}</text>'
        f'<rect class="idle" x="{LEFT}" y="{top}" width="{WIDTH - LEFT}" height="{LANE}"/>'
    ]
    below = np.zeros(COLUMNS)
    found = time_fractions(trace, window)
    for kind in KINDS:
        above = np.minimum(below + found[kind], 1.0)
        parts.append(f'<path class="{kind}" d="{_area(below, above, top)}"/>')
        below = above
    return "".join(parts)


def _area(below: Any, above: Any, top: int) -> str:
    """The outline of what lies between two curves, column by column."""
    width = (WIDTH - LEFT) / COLUMNS
    there = [(LEFT + i * width, LEFT + (i + 1) * width, top + LANE * (1 - y)) for i, y in enumerate(above)]
    back = [(LEFT + i * width, LEFT + (i + 1) * width, top + LANE * (1 - y)) for i, y in enumerate(below)]
    points = [f"{x:.1f},{y:.1f}" for left, right, y in there for x in (left, right)]
    points += [f"{x:.1f},{y:.1f}" for left, right, y in reversed(back) for x in (right, left)]
    return "M" + "L".join(points) + "Z"


def _x(at: float, window: TimeWindow) -> float:
    return LEFT + (WIDTH - LEFT) * (at - window.start) / window.seconds


def _step_lines(traces: Sequence[RankTrace], window: TimeWindow, height: int) -> str:
    """Where steps end."""
    parts = []
    for number, step in enumerate(_steps(traces)):
        if window.start <= step.start < window.end:
            x = _x(step.start, window)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 24}"/>'
                f'<text class="small" x="{x + 2:.1f}" y="{TOP - 8}">{number + 1}</text>'
            )
    return "".join(parts)


def _axis(window: TimeWindow, height: int) -> str:
    ends = (("start", LEFT, "0 s"), ("end", WIDTH, f"{window.seconds:.2f} s"))
    return "".join(
        f'<text class="small" x="{x}" y="{height - 8}" text-anchor="{anchor}">{text}</text>' for anchor, x, text in ends
    )


def _legend() -> str:
    message = [*((kind, LABELS[kind]) for kind in KINDS), ("idle", "anything else: text encoders, scheduler")]
    keys = " ".join(f'<span><span class="key {kind}"></span>{text}</span>' for kind, text in message)
    return f'<div class="legend">{keys}</div>'


def longest_waits(traces: Iterable[RankTrace], window: TimeWindow, limit: int = 8) -> list[tuple[str, ...]]:
    """(rank, message kind, layer, count, milliseconds), the longest first."""
    seconds: defaultdict[tuple[int, str, str], float] = defaultdict(float)
    times: Counter[tuple[int, str, str]] = Counter()
    for trace in traces:
        for event in trace.events:
            if event.what == "wait" and window.start <= trace.epoch + event.start < window.end:
                seconds[trace.rank, event.kind, event.where] += event.seconds
                times[trace.rank, event.kind, event.where] += 1
    costliest = sorted(seconds.items(), key=lambda item: -item[1])[:limit]
    return [
        (str(rank), kind, where, str(times[rank, kind, where]), f"{1e3 * spent:.1f} ms")
        for (rank, kind, where), spent in costliest
    ]
