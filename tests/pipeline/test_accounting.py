"""Run statistics: bytes, waiting, exact steps and memory, by rank, step and kind; and its trace."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from diffusers import HeunDiscreteScheduler

from patchpar import ParallelPipeline, Plan, PlanError, Run
from patchpar.strategies import parse_strategy
from tests.breadth import first_of

from .conftest import QUICK, generator

PATCH_KINDS = {"halo", "moments", "kv", "prediction"}
STEPS = 3
HEAD_WIDTH = 8  # of every self-attention of the pool's model


@pytest.fixture
def traced(parallel: ParallelPipeline) -> Iterator[ParallelPipeline]:
    parallel.tracing = True
    yield parallel
    parallel.tracing = False


def generate(pipe: ParallelPipeline, strategy: str = "exact", *, steps: int = STEPS, **degrees: int) -> Run:
    pipe.plan = Plan(**(degrees or {"patch": 2}), strategy=parse_strategy(strategy))
    pipe(**{**QUICK, "num_inference_steps": steps}, output_type="latent", generator=generator())
    assert pipe.last_run is not None
    return pipe.last_run


def summed(parts: Any) -> dict[str, float]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


# --- figures --------------------------------------------------------------------------------------------------------


def test_exact_patches(parallel: ParallelPipeline) -> None:
    run = generate(parallel)
    first, second = run.ranks
    assert [(rank.rank, rank.device) for rank in run.ranks] == [(0, "cpu"), (1, "cpu")]
    assert first.bytes_sent == second.bytes_received  # nothing is lost, nothing is counted twice
    assert second.bytes_sent == first.bytes_received
    for rank in run.ranks:
        assert set(rank.bytes_sent) == PATCH_KINDS
        assert len(rank.steps) == run.steps == STEPS
        assert rank.steps[0].bytes_sent == rank.steps[1].bytes_sent == rank.steps[2].bytes_sent
        assert summed(step.bytes_sent for step in rank.steps) == rank.bytes_sent
        assert summed(step.seconds_waited for step in rank.steps) == pytest.approx(dict(rank.seconds_waited))
        assert {"moments+halo", "kv", "prediction"} <= set(rank.seconds_waited)
        assert rank.stale_bytes == 0
    assert run.exact_steps is None
    assert run.bytes_per_step == tuple(sum(rank.bytes_sent.values()) // STEPS for rank in run.ranks)
    assert "exact," not in str(run)
    assert "held" not in str(run)


@pytest.mark.parametrize(
    "strategy", first_of(["displaced:warmup_steps=1", "pcpp:warmup_steps=1", "fresh-edges"], "fresh-edges")
)
def test_old_values_are_counted(parallel: ParallelPipeline, strategy: str) -> None:
    run = generate(parallel, strategy)
    assert run.exact_steps == 1
    assert f": {STEPS} steps, 1 exact, in " in str(run)
    assert "of stale values held" in str(run)
    for rank in run.ranks:
        assert [(step.exact_calls, step.stale_calls) for step in rank.steps] == [(1, 0), (0, 1), (0, 1)]
        assert rank.stale_bytes > 0
        assert set(rank.bytes_sent) == PATCH_KINDS | ({"correction"} if strategy == "fresh-edges" else set())


LARGEST_LAYER = 32768  # bytes of all keys and values of one: where attention reads others than came, all layers use it


def test_what_is_held_is_what_came_and_our_own(parallel: ParallelPipeline) -> None:
    """Fresh edges hold keys and values alone: of all tokens, in one buffer, so that nothing is copied together.

    Led on, they also hold what came the step before; and to tell how their own have changed, those of two steps, each
    with a mean a channel. What is told of them is two numbers a channel, and one a head.
    """
    for strategy, arrived, own, derived in (
        ("fresh-edges:extrapolated=false,correction=none", 1, 1, 0),
        ("fresh-edges:correction=none", 2, 1, LARGEST_LAYER),
        ("fresh-edges", 2, 3, LARGEST_LAYER),
    ):
        for rank in generate(parallel, strategy, steps=2).ranks:
            step = rank.steps[1]
            means = step.bytes_sent.get("correction", 0) * 2 * HEAD_WIDTH // (2 * HEAD_WIDTH + 1)
            tokens = arrived * step.bytes_received["kv"] + own * step.bytes_sent["kv"]
            assert rank.stale_bytes == tokens + means + derived, strategy


def test_a_warm_up_of_all_steps_is_exact_and_says_so(parallel: ParallelPipeline) -> None:
    run = generate(parallel, f"displaced:warmup_steps={STEPS}")
    assert run.exact_steps == STEPS
    assert f"{STEPS} steps, all exact," in str(run)
    assert not any(rank.stale_calls for rank in run.ranks)


def test_partial_conditioning_sends_less_after_its_warm_up(parallel: ParallelPipeline) -> None:
    for rank in generate(parallel, "pcpp:warmup_steps=1,fraction=0.3").ranks:
        warm, *rest = (step.bytes_sent["kv"] for step in rank.steps)
        assert all(sent < 0.5 * warm for sent in rest)


@pytest.mark.parametrize(("exchange", "kinds"), [("off", {"prediction"}), ("frozen", {"prediction"})])
def test_no_exchange_no_bytes(parallel: ParallelPipeline, exchange: str, kinds: set[str]) -> None:
    """The negative control: what is counted is what is sent."""
    generate(parallel, "displaced:warmup_steps=1")
    parallel._executor.call("control", exchange=exchange)
    try:
        for rank in generate(parallel, "displaced:warmup_steps=1").ranks:
            assert {kind for kind, sent in rank.steps[-1].bytes_sent.items() if sent} == kinds
    finally:
        parallel._executor.call("control", exchange="on")


def test_a_scheduler_of_second_order_takes_more_steps(parallel: ParallelPipeline) -> None:
    """One warm-up step is two evaluations of the denoiser, and both count."""
    before = parallel.scheduler
    parallel.scheduler = HeunDiscreteScheduler.from_config(before.config)
    try:
        run = generate(parallel, "displaced:warmup_steps=1")
    finally:
        parallel.scheduler = before
    assert run.steps == 2 * STEPS - 1
    assert run.exact_steps == 2


def test_every_call_starts_from_zero(parallel: ParallelPipeline) -> None:
    first, second = (generate(parallel, "displaced:warmup_steps=1") for _ in range(2))
    for one, other in zip(first.ranks, second.ranks, strict=True):
        assert one.bytes_sent == other.bytes_sent
        assert one.stale_bytes == other.stale_bytes
        assert [step.bytes_sent for step in one.steps] == [step.bytes_sent for step in other.steps]


def test_guidance(parallel: ParallelPipeline) -> None:
    run = generate(parallel, cfg=2)
    assert [set(rank.bytes_sent) for rank in run.ranks] == [{"guidance"}] * 2
    assert run.exact_steps is None


def test_json_has_every_rank(parallel: ParallelPipeline) -> None:
    run = generate(parallel, "displaced:warmup_steps=1")
    found = json.loads(json.dumps(run.as_dict()))
    assert found["exact_steps"] == 1
    assert found["stale_bytes"] == max(rank["stale_bytes"] for rank in found["ranks"])
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["bytes_by_kind"] == found["ranks"][0]["bytes_sent"]
    step = found["ranks"][1]["steps"][2]
    assert (step["exact_calls"], step["stale_calls"]) == (0, 1)
    assert set(step["bytes_sent"]) == set(step["bytes_received"]) == PATCH_KINDS


def test_one_device(plain: Any) -> None:
    with ParallelPipeline(plain, devices="cpu:1") as pipe:
        pipe.set_progress_bar_config(disable=True)
        pipe.tracing = True
        pipe(**{**QUICK, "num_inference_steps": STEPS}, output_type="latent", generator=generator())
        run = pipe.last_run
        pipe.restore()
    assert run is not None
    assert (run.steps, run.exact_steps, run.stale_bytes, run.bytes_per_step) == (STEPS, None, 0, (0,))
    assert "sent" not in str(run)
    (rank,) = run.ranks
    assert ": 1 step in " in str(replace(run, ranks=(replace(rank, steps=rank.steps[:1]),)))
    (trace,) = (rank.trace for rank in run.ranks)
    assert trace is not None
    assert [event.where for event in trace.events] == ["step 0", "step 1", "step 2"]


# --- the trace ------------------------------------------------------------------------------------------------------


def entries_of(run: Run, path: Path) -> list[dict[str, Any]]:
    run.save_trace(path)
    return [entry for entry in json.loads(path.read_text())["traceEvents"] if entry["ph"] == "X"]


def inside(entry: dict[str, Any], outer: dict[str, Any]) -> bool:
    """Within a microsecond, in which times are written."""
    begins = outer["ts"] - 1 <= entry["ts"]
    return begins and entry["ts"] + entry["dur"] <= outer["ts"] + outer["dur"] + 1


def of_rank(entries: list[dict[str, Any]], rank: int, *categories: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["pid"] == rank and entry["cat"] in categories]


@pytest.mark.parametrize("strategy", first_of(["exact", "displaced:warmup_steps=1", "fresh-edges"], "fresh-edges"))
def test_calls_lie_in_steps_and_exchange_points_in_calls(
    traced: ParallelPipeline, tmp_path: Path, strategy: str
) -> None:
    generate(traced, strategy, steps=1)  # the first call is compared with the plain denoiser
    entries = entries_of(generate(traced, strategy), tmp_path / "out.json")
    ages = ["exact"] * STEPS if strategy == "exact" else ["exact", "stale", "stale"]
    for rank in (0, 1):
        calls, steps = of_rank(entries, rank, "call"), of_rank(entries, rank, "step")
        assert [call["name"] for call in calls] == [f"step {n}, call 0 ({age})" for n, age in enumerate(ages)]
        assert [step["name"] for step in steps] == [f"step {n}" for n in range(STEPS)]
        assert all(inside(call, step) for call, step in zip(calls, steps, strict=True))
        last = calls[-1]["ts"] + calls[-1]["dur"]  # afterwards old values that nobody needs any more are taken in
        points = [point for point in of_rank(entries, rank, "send", "wait") if point["ts"] < last]
        assert {point["cat"] for point in points} == {"send", "wait"}
        assert all(any(inside(point, call) for call in calls) for point in points)


def test_sending_waiting_and_computing_make_up_a_call(traced: ParallelPipeline, tmp_path: Path) -> None:
    entries = entries_of(generate(traced, "displaced:warmup_steps=1"), tmp_path / "out.json")
    for rank in (0, 1):
        calls = of_rank(entries, rank, "call")
        assert calls
        for call in calls:
            parts = [e for e in of_rank(entries, rank, "send", "wait", "compute", "check") if inside(e, call)]
            assert sum(part["dur"] for part in parts) == pytest.approx(call["dur"], rel=1e-3)
            assert sum(part["dur"] for part in parts if part["cat"] == "compute") < call["dur"]
            parts.sort(key=lambda part: part["ts"])  # one after the other
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(parts))


def test_waits_of_the_trace_are_those_of_the_figures(traced: ParallelPipeline) -> None:
    for rank in generate(traced).ranks:
        assert rank.trace is not None
        waits = summed({event.kind: event.seconds} for event in rank.trace.events if event.what == "wait")
        assert waits == pytest.approx(dict(rank.seconds_waited), rel=0.1, abs=0.01)
        least = {kind: seconds - 1e-9 for kind, seconds in rank.seconds_waited.items()}
        assert all(waits[kind] >= least[kind] for kind in least), "an event ends just after its wait was counted"


def test_a_trace_of_guidance(traced: ParallelPipeline, tmp_path: Path) -> None:
    entries = entries_of(generate(traced, cfg=2), tmp_path / "out.json")
    for rank in (0, 1):
        assert len(of_rank(entries, rank, "call")) == STEPS
        assert {point["name"] for point in of_rank(entries, rank, "send", "wait")} == {"send guidance", "wait guidance"}


def test_no_trace_unless_asked_for(parallel: ParallelPipeline, tmp_path: Path) -> None:
    run = generate(parallel)
    assert [rank.trace for rank in run.ranks] == [None, None]
    with pytest.raises(PlanError, match=r"pipe\.tracing = True"):
        run.save_trace(tmp_path / "out.json")
    assert not list(tmp_path.iterdir())
