"""The timeline shows where the time went: computing, sending and waiting, of any stretch of steps."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import timeline
from app.timeline import TimeWindow, longest_waits, time_fractions, to_svg, traces_of, window_of
from app.timeline_tab import TimelineTab
from patchpar.comm.trace import RankTrace, TraceEvent
from patchpar.pipeline.rank_stats import RankStats
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan

from .app_states import state_of


def trace(rank: int) -> RankTrace:
    """Two steps of one second: half computed, rank 0 waits, rank 1 sends."""
    what = "wait" if rank == 0 else "send"
    events = [
        TraceEvent("call", "", "step 0, call 0 (exact)", 0.0, 1.0),
        TraceEvent(what, "kv", "up.<0>", 0.25, 0.5),
        TraceEvent("step", "", "step 0", 0.0, 1.0),
        TraceEvent("call", "", "step 1, call 0 (exact)", 1.0, 1.0),
        TraceEvent(what, "kv", "up.<0>", 1.5, 0.5),
        TraceEvent("step", "", "step 1", 1.0, 1.0),
        TraceEvent("vae", "", "decode", 2.5, 0.5),
    ]
    return RankTrace(rank, f"cpu & {rank}", 1000.0, tuple(events))


TRACES = [trace(0), trace(1)]


@pytest.mark.parametrize(
    ("first", "last", "window"),
    [(0, 1, (1000.0, 1003.0)), (0, 0, (1000.0, 1001.0)), (1, 1, (1001.0, 1003.0)), (0, 99, (1000.0, 1003.0))],
)
def test_a_window_goes_from_step_to_step(first: int, last: int, window: tuple[float, float]) -> None:
    assert window_of(TRACES, first, last) == TimeWindow(*window)


def test_fractions_add_up_to_the_time_spent() -> None:
    window = window_of(TRACES, 0, 1)
    spent = {kind: float(part.sum()) * 3 / timeline.COLUMNS for kind, part in time_fractions(TRACES[0], window).items()}
    assert spent == pytest.approx({"compute": 1.5, "wait": 1.0, "send": 0.0, "check": 0.0}, abs=0.01)
    other = {kind: float(part.sum()) * 3 / timeline.COLUMNS for kind, part in time_fractions(TRACES[1], window).items()}
    assert other == pytest.approx({"compute": 1.5, "wait": 0.0, "send": 1.0, "check": 0.0}, abs=0.01)


def test_no_column_holds_more_than_all_of_its_time() -> None:
    rng = np.random.default_rng(0)
    starts = np.sort(rng.uniform(0, 1, 300))
    events = [
        TraceEvent("wait", "kv", "a", float(s), float(e - s)) for s, e in zip(starts[::2], starts[1::2], strict=True)
    ]
    found = time_fractions(
        RankTrace(0, "cpu", 0.0, (TraceEvent("call", "", "x", 0.0, 1.0), *events)), TimeWindow(0.0, 1.0)
    )
    total = sum(found.values())
    assert np.all(total <= 1 + 1e-9)
    assert float(found["wait"].mean()) == pytest.approx(sum(event.seconds for event in events))


def test_the_generating_has_a_lane_for_each_rank_and_nothing_but_text() -> None:
    displayed = to_svg(TRACES, 0, 1)
    assert displayed.count('class="wait"') == displayed.count('class="compute"') == 2
    assert "cpu &amp; 0" in displayed
    assert len(displayed) < 200_000
    numbers = [float(number) for number in re.findall(r"[ML]([\d.]+),", displayed)]
    assert max(numbers) <= timeline.WIDTH + 0.1
    assert "rank 1" in displayed


def test_the_longest_waits_come_first_and_belong_to_the_window() -> None:
    assert longest_waits(TRACES, window_of(TRACES, 0, 1)) == [("0", "kv", "up.<0>", "2", "1000.0 ms")]
    assert longest_waits(TRACES, window_of(TRACES, 0, 0)) == [("0", "kv", "up.<0>", "1", "500.0 ms")]


def test_a_run_without_a_trace_has_nothing_to_show() -> None:
    empty: dict[str, Any] = {"bytes_sent": {}, "bytes_received": {}, "seconds_waited": {}}
    run = Run(plan=Plan(), seconds=1.0, ranks=(RankStats(rank=0, device="cpu", **empty),))
    assert traces_of(run) == traces_of(None) == []
    assert "<svg" in to_svg([], 0, 0)


def test_a_page_is_shown_its_own_last_run_and_given_the_trace() -> None:
    with closing(state_of()) as state:
        figures: dict[str, Any] = {"device": "cpu", "bytes_sent": {}, "bytes_received": {}, "seconds_waited": {}}
        ranks = tuple(RankStats(rank=rank, trace=trace(rank), **figures) for rank in range(2))
        state.job_queue.store("a" * 32, "run", Run(plan=Plan(patch=2), seconds=3.0, ranks=ranks))
        tab = TimelineTab(state)
        image_runner, tables, _, last, save = tab.refresh("a" * 32)
        assert "<svg" in image_runner
        assert "up.&lt;0&gt;" in tables
        assert (last["value"], last["maximum"]) == (2, 2)
        assert "traceEvents" in Path(save["value"]).read_text()
        assert timeline_is_empty(tab.refresh("b" * 32))
    assert not Path(save["value"]).exists()


def timeline_is_empty(displayed: tuple[Any, ...]) -> bool:
    return "Generate an image first" in displayed[0] and displayed[4]["value"] is None
