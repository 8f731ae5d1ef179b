"""When a step is made exact again: by the drift against a quality, or by what a budget has left."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError
from patchpar.plan.resync import DB_AT_FULL_DRIFT, Resync, ResyncDecider, check_resync
from patchpar.plan.step_clock import StepClock
from patchpar.shard.stale.state import StaleState
from patchpar.strategies.fresh_edges import MIB, FreshEdges
from tests.unit.threads import on_threads


def test_six_decibels_are_half_the_drift() -> None:
    for reported, full in DB_AT_FULL_DRIFT.items():
        assert Resync(quality=full, correction=reported).limit() == pytest.approx(1.0)
    ratio = Resync(quality=40.0).limit() / Resync(quality=40.0 + 20 * math.log10(2)).limit()
    assert ratio == pytest.approx(2.0)
    assert Resync(budget=1e6).limit() == math.inf


def test_a_quality_asks_for_a_fresh_step_above_its_drift() -> None:
    decider = ResyncDecider(Resync(quality=DB_AT_FULL_DRIFT["none"] + 20))
    drifts = [0.05, 0.2, 0.09, 0.11]
    assert [decider.next_is_fresh(drift, 10.0, fresh=False) for drift in drifts] == [False, True, False, True]


def spend(budget: float, drifts: list[float], *, full: float = 100.0, stale: float = 10.0) -> tuple[list[bool], float]:
    """Which of the steps are fresh, and bytes per step: a fresh step sends `full`, another `stale`."""
    decider, fresh, steps, spent = ResyncDecider(Resync(budget=budget)), True, [], 0.0
    for drift in drifts:
        steps.append(fresh)
        sent = full if fresh else stale
        spent += sent
        fresh = decider.next_is_fresh(drift, sent, fresh=fresh)
    return steps, spent / len(drifts)


@pytest.mark.parametrize("budget", [20.0, 40.0, 70.0])
def test_a_budget_is_kept_on_average_and_used(budget: float) -> None:
    steps, mean = spend(budget, [0.3] * 60)
    assert mean <= budget + 100 / 60  # the first step cannot be had for less
    assert mean >= budget - 10
    assert 1 < sum(steps) < 60


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_budget_is_of_a_step_however_many_calls_it_has(calls: int) -> None:
    """A pipeline may call its denoiser once for each guidance branch."""
    budget, full, stale, steps = 40.0 * calls, 100.0, 10.0, 60

    def run(transport: Any) -> float:
        clock, sent = StepClock(), 0.0
        state = StaleState(Communicator(transport), FreshEdges(budget=budget / MIB).policy, clock)
        for _ in range(steps):
            for _ in range(calls):
                clock.next_call()
                fresh = state.begin("form")
                sent += full if fresh else stale
                state.receive([[torch.tensor([0.09, 1.0, full if fresh else stale])]], fresh=fresh)
            clock.tick()
        return sent / steps

    (mean,) = on_threads(1, run)
    assert budget - 10 * calls <= mean <= budget + full * calls / steps


def test_what_a_rank_reports_is_drift_and_bytes_of_this_call() -> None:
    def run(transport: Any) -> list[list[float]]:
        clock, found = StepClock(), []
        state = StaleState(Communicator(transport), FreshEdges(budget=1.0).policy, clock)
        for sent in (30, 20):
            clock.next_call()
            state.begin("form")
            state.comm.traffic.book([("kv", sent, 0)])
            state.cache.drift += torch.tensor([0.25, 0.5])
            found += [x.tolist() for x in state.report(still_to_send=12)]
            clock.tick()
        return found

    assert on_threads(1, run) == [[[0.25, 0.5, 42.0], [0.25, 0.5, 32.0]]]


def test_a_budget_is_of_the_rank_that_sends_most() -> None:
    def fresh_steps(of_first: float, of_second: float) -> list[bool]:
        def run(transport: Any) -> list[bool]:
            clock, found = StepClock(), []
            state = StaleState(Communicator(transport), FreshEdges(budget=40.0 / MIB).policy, clock)
            for _ in range(12):
                clock.next_call()
                found.append(state.begin("form"))
                sent = [part * (100.0 if found[-1] else 10.0) for part in (of_first, of_second)]
                state.receive([[torch.tensor([0.09, 1.0, each])] for each in sent], fresh=found[-1])
                clock.tick()
            return found

        (found,) = on_threads(1, run)
        return found

    assert fresh_steps(0.1, 1.0) == fresh_steps(1.0, 0.1) == fresh_steps(1.0, 1.0)
    assert fresh_steps(0.1, 0.1) != fresh_steps(1.0, 1.0), "the control: with less sent there is more to spend"


def test_another_image_has_all_of_its_budget() -> None:
    """Neither what the last one has spent counts, nor how many calls a step of it had."""

    def run(transport: Any) -> list[list[bool]]:
        clock = StepClock()
        state = StaleState(Communicator(transport), FreshEdges(budget=40.0 / MIB).policy, clock)

        def image(calls: int, drift: float) -> list[bool]:
            state.reset()
            clock.reset()
            found = []
            for _ in range(12):
                for _ in range(calls):
                    clock.next_call()
                    found.append(state.begin("form"))
                    sent = 100.0 if found[-1] else 10.0
                    state.receive([[torch.tensor([drift, 1.0, sent])]], fresh=found[-1])
                clock.tick()
            return found

        wanted = image(1, 0.04)
        image(2, 0.09)
        return [wanted, image(1, 0.04)]

    ((wanted, found),) = on_threads(1, run)
    assert 1 < sum(wanted) < 12
    assert found == wanted


def test_drift_is_that_of_keys_of_any_size() -> None:
    """What is reported is how far keys have gone and how long they are, both squared."""

    def run(transport: Any, scale: float) -> list[bool]:
        clock = StepClock()
        state = StaleState(Communicator(transport), FreshEdges(quality=35.0).policy, clock)
        found = []
        for moved in (4.0, 0.0004, 4.0, 4.0, 0.0004, 0.0004):
            clock.next_call()
            found.append(state.begin("form"))
            state.receive([[scale * torch.tensor([moved, 1.0, 0.0])]], fresh=found[-1])
            clock.tick()
        return found

    (wanted,), (found,) = (on_threads(1, run, scale) for scale in (1.0, 0.01))
    assert found == wanted == [True, True, False, True, True, False]


def test_a_budget_below_a_stale_step_buys_nothing() -> None:
    steps, _ = spend(5.0, [0.3] * 30)
    assert steps == [True] + [False] * 29


def test_a_budget_above_a_fresh_step_buys_all() -> None:
    steps, _ = spend(100.0, [0.3] * 30)
    assert all(steps)


def test_a_budget_goes_where_the_drift_is() -> None:
    """Small drift is not worth an exact step while large ones are in mind."""
    quiet, wild = [0.01] * 10, [0.5] * 10
    steps, _ = spend(55.0, [*wild, *quiet, *wild])
    assert sum(steps[11:15]) == 0
    assert sum(steps[21:]) >= 4


@pytest.mark.parametrize(
    ("quality", "budget", "message"),
    [
        (30, 5, r"quality=30 and budget=5: give only one of them"),
        (0, None, r"quality=0: it is a PSNR in dB, a number above 0"),
        (-3.0, None, "quality=-3.0"),
        (math.nan, None, "quality=nan"),
        (math.inf, None, "quality=inf"),
        (True, None, "quality=True"),
        ("high", None, "quality='high'"),
        (None, 0, r"budget=0: it is MiB per step, a number above 0"),
        (None, "all", "budget='all'"),
    ],
)
def test_refuses_what_is_no_rule(quality: object, budget: object, message: str) -> None:
    with pytest.raises(PlanError, match=f"here: {message}"):
        check_resync("here", quality, budget)


@pytest.mark.parametrize(("quality", "budget"), [(None, None), (35, None), (42.5, None), (None, 0.5)])
def test_one_rule_or_none(quality: object, budget: object) -> None:
    check_resync("here", quality, budget)
