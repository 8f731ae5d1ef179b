"""Traces and ledgers: the file says what happened, waiting is booked to the step and the kind that cost it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.comm import collectives, traffic
from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.trace import RankTrace, TraceEvent, write_trace
from patchpar.comm.transport import message
from patchpar.pipeline import stats_recorder
from patchpar.pipeline.rank_stats import RankStats
from patchpar.pipeline.stats_recorder import StatsRecorder
from patchpar.plan.mesh import Mesh
from tests.unit.threads import on_threads

LATE = 0.25
"""Seconds that one rank comes late in these tests."""

EVENTS = (
    TraceEvent("send", "halo", "conv", 11.0, 0.5),
    TraceEvent("wait", "halo", "conv", 12.0, 2.0),
    TraceEvent("call", "", "step 0, call 0 (exact)", 10.0, 5.0),
    TraceEvent("step", "", "step 0", 10.0, 5.5),
    TraceEvent("wait", "guidance", "guidance, step 0, call 0", 15.2, 0.1),  # outside the call
)


def written(tmp_path: Path, *ranks: RankTrace) -> list[dict[str, Any]]:
    path = tmp_path / "out.json"
    write_trace(path, ranks)
    found = json.loads(path.read_text())
    assert found["displayTimeUnit"] == "ms"
    return [entry for entry in found["traceEvents"] if entry["ph"] == "X"]


def test_every_event_is_there_with_its_time_in_microseconds(tmp_path: Path) -> None:
    entries = written(tmp_path, RankTrace(3, "cpu", 100.0, EVENTS))
    wait = next(entry for entry in entries if entry["name"] == "wait halo")
    assert (wait["pid"], wait["tid"], wait["args"]) == (3, 1, {"where": "conv"})
    assert (wait["ts"], wait["dur"]) == (pytest.approx(2e6), pytest.approx(2e6))  # from the first event, the call
    call = next(entry for entry in entries if entry["cat"] == "call")
    assert (call["tid"], call["name"], call["ts"]) == (0, "step 0, call 0 (exact)", 0.0)


def test_what_no_exchange_point_takes_of_a_call_is_computing(tmp_path: Path) -> None:
    entries = written(tmp_path, RankTrace(0, "cpu", 0.0, EVENTS))
    computing = [(entry["ts"] / 1e6, entry["dur"] / 1e6) for entry in entries if entry["cat"] == "compute"]
    assert computing == [pytest.approx(pair) for pair in ((0.0, 1.0), (1.5, 0.5), (4.0, 1.0))]


def test_clocks_of_ranks_are_brought_together(tmp_path: Path) -> None:
    """Each rank's own clock began when it liked."""
    call = TraceEvent("call", "", "step 0, call 0 (exact)", 5.0, 1.0)
    entries = written(tmp_path, RankTrace(0, "cpu", 1000.0, (call,)), RankTrace(1, "cpu", 1004.0, (call,)))
    assert {entry["pid"]: entry["ts"] for entry in entries if entry["cat"] == "call"} == {0: 0.0, 1: 4e6}


def test_a_trace_of_nothing_is_a_file_all_the_same(tmp_path: Path) -> None:
    assert written(tmp_path, RankTrace(0, "cpu", 0.0, ())) == []


class LateRank:
    """Stands for `time` on all ranks: nothing takes time, but rank 1 comes late once rank 0 waits for it."""

    def __init__(self) -> None:
        self.now, self.awaited = 0.0, threading.Event()

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def comes(self) -> None:
        assert self.awaited.wait(60)
        self.now += LATE

    def __enter__(self) -> None:
        """Rank 0 has nothing to do but to wait."""
        self.awaited.set()

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateRank:
    found = LateRank()
    for module in (collectives, message, stats_recorder, traffic):
        monkeypatch.setattr(module, "time", found)
    return found


def two_steps(transport: Any, late: LateRank, tracing: bool = True) -> RankStats:
    """Two steps of one gather each; in the second one rank 1 comes late."""
    comm, axis = Communicator(transport), Mesh(transport.rank, range(2), patch=2)["patch"]
    own = torch.zeros(8)
    AllGather(comm, axis, "kv", "before").same(own)  # the ranks are there
    comm.traffic.clear()
    recorder = StatsRecorder(comm.traffic, [], tracing=tracing)
    for step, kind in enumerate(("kv", "prediction")):
        if step == 1 and transport.rank == 0:
            transport.waiting = late
        elif step == 1:
            late.comes()
        AllGather(comm, axis, kind, f"seam {step}").same(own)
        recorder.end_step()
    AllGather(comm, axis, "output", "output").same(own)
    recorder.end_image()
    return recorder.figures(transport.rank, "cpu")


def test_bytes_and_waiting_are_booked_to_their_step_and_kind(late: LateRank) -> None:
    early, other = on_threads(2, two_steps, late)
    for found in (early, other):
        assert [step.bytes_sent for step in found.steps] == [{"kv": 32}, {"prediction": 32}]
        assert [step.bytes_received for step in found.steps] == [{"kv": 32}, {"prediction": 32}]
        assert found.bytes_sent == {"kv": 32, "prediction": 32, "output": 32}  # the last after all steps
    assert [step.seconds_waited for step in early.steps] == [{}, {"prediction": LATE}]
    assert [step.seconds_waited for step in other.steps] == [{}, {}]
    assert early.seconds_waited == {"kv": 0.0, "prediction": LATE, "output": 0.0}


def test_the_trace_has_what_was_booked(late: LateRank) -> None:
    early, _ = on_threads(2, two_steps, late)
    assert early.trace is not None
    waits = {event.kind: event.seconds for event in early.trace.events if event.what == "wait"}
    assert waits == early.seconds_waited
    steps = [(event.where, event.seconds) for event in early.trace.events if event.what == "step"]
    assert steps == [("step 0", 0.0), ("step 1", LATE)]


def test_nothing_is_kept_unless_wanted(late: LateRank) -> None:
    found = on_threads(2, two_steps, late, False)
    assert [rank.trace for rank in found] == [None, None]
