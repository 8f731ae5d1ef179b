"""The overhead of a server is measured against plain calls in turn."""

from __future__ import annotations

import pytest

from benchmarks.serving.__main__ import overhead_lines, real_lines
from benchmarks.serving.overhead import TimedCall, _of
from benchmarks.serving.real_mix import LOAD, SMALL_PART, RealKind, RealMix, RealOutcome, arrivals
from benchmarks.serving.regroup import Regroup, measure_regroups, regroup_lines


def test_overhead_is_the_median_of_pairs() -> None:
    pairs = [
        (TimedCall(whole=1.0 + noise, first=0.01), TimedCall(whole=1.02 + noise, first=0.02, queued=0.001))
        for noise in (0.0, 0.5, 3.0)
    ]
    found = _of(7, pairs)
    assert found.beside == pytest.approx(0.02)
    assert found.call == pytest.approx(1.5)
    assert found.ratio == pytest.approx(0.02 / 1.5)
    assert (found.first, found.plain_first, found.queued) == pytest.approx((0.02, 0.01, 0.001))
    text = "\n".join(overhead_lines(found, 3))
    assert "7 steps" in text
    assert "1.3%" in text


@pytest.mark.breadth
def test_a_server_is_measured() -> None:
    from benchmarks.serving.overhead import measure

    found = measure(2, seconds=0.05)
    assert 0 < found.plain_first < found.call
    assert found.first > 0
    assert found.queued < found.first


def test_what_is_printed_of_lost_workers() -> None:
    text = "\n".join(regroup_lines([Regroup(0.004, 0.05), Regroup(0.006, 0.07), Regroup(0.02, 0.3)]))
    assert "| from the kill to the decision how to go on | 6 | 20 |" in text
    assert "begins again | 70 | 300 |" in text


@pytest.mark.breadth  # four starts of workers
def test_ranks_that_are_left_go_on_after_a_kill() -> None:
    (found,) = measure_regroups(1)
    assert 0 < found.noticed < 30
    assert 0 < found.regrouped < 30


def test_arrivals_have_the_load_and_the_parts() -> None:
    small, large = RealKind(side=64, steps=2, alone=1.0), RealKind(side=96, steps=2, alone=4.0)
    found = arrivals(small, large, count=2000)
    assert sum(each.kind is small for each in found) / 2000 == pytest.approx(SMALL_PART, abs=0.03)
    assert sum(each.kind.alone for each in found) / found[-1].at / 2 == pytest.approx(LOAD, rel=0.08)
    assert all(each.kind.alone <= each.left <= 2 * each.kind.alone for each in found)
    outcome = RealOutcome(policy="deadline", met=0.5, per_minute=12.0, seconds=0.25)
    assert "| deadline | 50% | 12.0 | 0.25 |" in real_lines([(outcome, outcome)], 2000)


@pytest.mark.breadth
@pytest.mark.timeout(1200)
def test_a_real_mix_ends() -> None:
    """Every request of every policy. The order of the policies is a figure of an idle machine."""
    with RealMix(RealKind(side=64, steps=2), RealKind(side=96, steps=4)) as mix:
        trace = arrivals(*mix.learn(), count=6)
        for policy in ("latency", "throughput", "deadline"):
            found = mix.outcome(policy, trace, with_deadlines=False)
            assert found.per_minute > 0
            assert found.seconds > 0
