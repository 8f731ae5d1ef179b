"""Times of two steps on a machine that is fast for a while and then slow: their ratio is that of either phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks.gpu.paired import PairedTimes, in_pairs

RATIO = 1.25


class Machine:
    """A clock that steps move on, by their work times how slow the machine is at that turn."""

    def __init__(self, slowness: Sequence[float]) -> None:
        self.now, self.turns = 0.0, iter(slowness)
        self.ran: list[str] = []

    def step(self, name: str, work: float) -> Callable[[], None]:
        def run() -> None:
            self.ran.append(name)
            self.now += work * next(self.turns)

        return run

    def measured(self, pairs: int) -> PairedTimes:
        return in_pairs(self.step("plain", 1.0), self.step("split", RATIO), pairs, clock=lambda: self.now)


def test_steps_run_in_strictly_alternating_turns() -> None:
    machine = Machine([1.0] * 6)
    assert machine.measured(3).pairs == ((1.0, RATIO),) * 3
    assert machine.ran == ["plain", "split"] * 3


@pytest.mark.parametrize("phases", [(3.0,) * 5 + (1.0,) * 5, (1.0, 2.7, 1.0, 0.4), (0.5, 1.0, 2.0, 4.0)])
def test_a_phase_in_which_the_machine_is_slow_changes_no_ratio(phases: Sequence[float]) -> None:
    times = Machine([phase for phase in phases for _ in range(2)]).measured(len(phases))
    assert times.ratio == pytest.approx(RATIO)
    assert times.quartiles == pytest.approx((RATIO, RATIO))


def test_a_phase_that_begins_within_a_pair_changes_no_median_where_the_least_times_are_of_two_phases() -> None:
    """One plain step has run in a fast phase, and no split one: as the least of each, 2.5 in the place of 1.25."""
    times = Machine([1.0] * 8 + [0.5] + [1.0] * 9).measured(9)
    assert times.ratio == pytest.approx(RATIO)
    assert min(split for _, split in times.pairs) / min(plain for plain, _ in times.pairs) == pytest.approx(2 * RATIO)


def test_what_varies_from_pair_to_pair_is_between_the_quartiles() -> None:
    times = PairedTimes(tuple((2.0, 2.0 * ratio) for ratio in (1.0, 1.5, 1.2, 1.4, 1.3)))
    assert (times.ratio, *times.quartiles) == pytest.approx((1.3, 1.2, 1.4))
    assert times.difference == pytest.approx(0.6)


def test_the_pairs_that_count_are_those_that_took_the_least_time_together() -> None:
    """Where others use the memory, the plain step may slow more than the split one: such pairs do not count."""
    quiet, loud = ((1.0, 1.5), (1.1, 1.7)), ((2.0, 2.4), (2.2, 2.5), (1.9, 2.0), (2.0, 2.1), (3.0, 3.1), (2.5, 2.6))
    times = PairedTimes.together([PairedTimes((*loud[:3], quiet[0])), PairedTimes((quiet[1], *loud[3:]))])
    assert len(times.pairs) == 8
    assert sorted(times.least_disturbed.pairs) == sorted(quiet)
    assert times.ratio < 1.2 < times.least_disturbed.ratio, "control: all pairs"
