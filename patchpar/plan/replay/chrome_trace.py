"""A replay as a file that chrome://tracing and Perfetto open, with one process for each rank."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchpar.plan.replay.replay import STEP, Replayed

LANES = ("steps", "device")


def write_chrome_trace(path: Path, found: Replayed) -> None:
    """Write the intervals of all ranks, times in microseconds."""
    path.write_text(json.dumps({"traceEvents": list(_entries(found)), "displayTimeUnit": "ms"}))


def _entries(found: Replayed) -> Iterator[dict[str, Any]]:
    for rank in range(len(found.ends)):
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}, simulated"}}
        for lane, name in enumerate(LANES):
            yield {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}
    for each in found.intervals:
        is_step = each.what == STEP
        yield {
            "ph": "X",
            "pid": each.rank,
            "tid": 0 if is_step else 1,
            "name": each.name if is_step else f"{each.what} {each.kind}".strip(),
            "cat": each.what,
            "ts": 1e6 * each.start,
            "dur": 1e6 * each.seconds,
            "args": {"where": each.name},
        }
