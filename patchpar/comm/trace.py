"""A timeline of each rank, as a file that chrome://tracing and Perfetto open.

    process 0  rank 0   steps     | step 0                     | step 1
                                  | step 0, call 0 (exact)   | | step 1, call 0 (stale)
                        exchanges |compute|send|wait|compute|| |compute|send|compute ...

All times are the host's: on a GPU a send returns at once and a wait may only order the stream.

Pure Python: a caller that only names a file need not import torch.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

STEPS = ("step", "call", "vae")  # a step of the scheduler, a call of the denoiser, one of a VAE in bands
EXCHANGE_POINTS = ("send", "wait", "check")  # in or between them; check: the comparison with the plain denoiser


class TraceEvent(NamedTuple):
    """One interval: `what` is one of STEPS or EXCHANGE_POINTS; `start` on the rank's monotonic clock, in seconds."""

    what: str
    kind: str
    where: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Events of one rank in the order they ended. `epoch`: wall-clock time at zero of its monotonic clock."""

    rank: int
    device: str
    epoch: float
    events: tuple[TraceEvent, ...]


def write_trace(path: Path, ranks: Sequence[RankTrace]) -> None:
    """Write the events of all ranks in Chrome's trace format, times in microseconds from the first event.

    Ranks of one machine share a clock; between machines times are as accurate as their wall clocks agree.
    """
    starts = [rank.epoch + event.start for rank in ranks for event in rank.events]
    zero = min(starts, default=0.0)
    found = [entry for rank in ranks for entry in _entries(rank, zero)]
    path.write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}))


def _entries(trace: RankTrace, zero: float) -> Iterator[dict[str, Any]]:
    yield _name(trace.rank, "process_name", f"rank {trace.rank} on {trace.device}")
    for thread, name in enumerate(("steps", "exchanges")):
        yield _name(trace.rank, "thread_name", name, thread)
    for event in (*trace.events, *_computing(trace.events)):
        yield {
            "ph": "X",
            "pid": trace.rank,
            "tid": 0 if event.what in STEPS else 1,
            "name": event.where if event.what in STEPS else f"{event.what} {event.kind}".strip(),
            "cat": event.what,
            "ts": 1e6 * (trace.epoch + event.start - zero),
            "dur": 1e6 * event.seconds,
            "args": {"where": event.where},
        }


def _name(rank: int, what: str, name: str, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {"name": name}}


def _computing(events: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield the time inside calls of denoiser and VAE outside exchanges, each up to the exchange that follows."""
    points = sorted((event for event in events if event.what in EXCHANGE_POINTS), key=lambda event: event.start)
    for call in (event for event in events if event.what in ("call", "vae")):
        now, end = call.start, call.start + call.seconds
        for point in (point for point in points if call.start <= point.start <= end):
            if point.start > now:
                yield TraceEvent("compute", "", point.where, now, point.start - now)
            now = max(now, point.start + point.seconds)
        if end > now:
            yield TraceEvent("compute", "", call.where, now, end - now)
