"""The replay of a trace is as long as the trace if its waits are those for messages, and is not if they are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replayed_trace import SKIPPED, compared, traced

COPY, SENDING = 100.0, 50.0
"""Microseconds."""
COMPUTING = ((3000.0, 5000.0), (3000.0, 5000.0), (3000.0, 5000.0), (6000.0, 2000.0), (4000.0, 4000.0))
"""Of both ranks in each step, of which the first ones are not replayed."""


def event(rank: int, what: str, start: float, end: float) -> dict[str, Any]:
    name = {"step": "step", "send": "send halo", "wait": "wait halo"}[what]
    return {"ph": "X", "pid": rank, "cat": what, "name": name, "ts": start, "dur": end - start, "args": {"where": "a"}}


def events(late: dict[int, float]) -> Iterator[dict[str, Any]]:
    """In each step both compute, send, wait for the other and compute again. `late`: of a step, without a cause."""
    now = [0.0, 0.0]
    for step, computing in enumerate(COMPUTING):
        start = list(now)
        sent = [now[rank] + computing[rank] + SENDING for rank in range(2)]
        over = [max(sent) + COPY + late.get(step, 0.0)] * 2
        now = [each + 1000.0 for each in over]
        for rank in range(2):
            yield event(rank, "send", sent[rank] - SENDING, sent[rank])
            yield event(rank, "wait", sent[rank], over[rank])
            yield event(rank, "step", start[rank], now[rank])


def trace(folder: Path, **late: float) -> Path:
    file = folder / "trace.json"
    file.write_text(json.dumps({"traceEvents": list(events({int(step[1:]): each for step, each in late.items()}))}))
    return file


def test_waits_for_the_slower_rank_follow_from_what_both_compute(tmp_path: Path) -> None:
    real, replayed, waited = compared(trace(tmp_path))
    computed = sum(max(each) + SENDING + COPY + 1000.0 for each in COMPUTING[SKIPPED:])
    assert real == pytest.approx(1e-6 * computed)
    assert replayed == pytest.approx(real)
    assert waited == pytest.approx(1e-6 * sum(abs(a - b) + 2 * COPY for a, b in COMPUTING[SKIPPED:]))


def test_a_wait_that_no_message_explains_makes_a_replay_shorter(tmp_path: Path) -> None:
    real, replayed, _ = compared(trace(tmp_path, s3=4000.0))
    assert replayed == pytest.approx(real - 4e-3)


@pytest.mark.breadth
def test_the_trace_of_two_real_ranks_is_as_long_as_its_replay(tmp_path: Path) -> None:
    real, replayed, waited = compared(traced(tmp_path, steps=8))
    assert waited > 0
    assert replayed == pytest.approx(real, rel=0.05)
