"""A choice of a plan is judged by what was measured, and links of the machine are those of the setting."""

from dataclasses import replace

import pytest

from benchmarks.forecast.ranking import PLANS, WITHIN, Row, calm, with_link
from patchpar.pipeline.planner.tune.timer import TimedRun
from patchpar.plan.link_model import LinkModel
from patchpar.plan.replay.measured_device import MeasuredDevice
from patchpar.plan.replay.measured_machine import LinkClass, MeasuredMachine


def row(predicted: dict[str, float], found: dict[str, float]) -> Row:
    return Row(
        setting="embedded:256",
        link="slow",
        predicted=dict.fromkeys(PLANS, 9.0) | predicted,
        found=dict.fromkeys(PLANS, 9.0) | found,
    )


def test_the_fastest_plan_is_right_and_another_costs_what_it_is_longer() -> None:
    right = row({"cfg=2": 1.0}, {"cfg=2": 2.0})
    assert (right.chosen, right.loss, right.speed_up) == ("cfg=2", 0.0, 4.5)
    wrong = row({"patch=2": 1.0}, {"patch=2": 3.0, "cfg=2": 2.0})
    assert (wrong.chosen, wrong.best) == ("patch=2", "cfg=2")
    assert wrong.loss == pytest.approx(0.5)
    assert wrong.loss > WITHIN


def test_preempted_steps_are_left_out_and_marked_where_there_are_no_others() -> None:
    assert calm([TimedRun(1.0), TimedRun(9.0, 0.5), TimedRun(1.2, 0.01)]) == [1.0, 1.2]
    unsure = Row(setting="s", link="l", predicted=dict.fromkeys(PLANS, 1.0), found=dict.fromkeys(PLANS, 1.0))
    assert "?" not in unsure.line()
    assert replace(unsure, preempted=("cfg=2",)).line().count("1000 / 1000?") == 1


def test_a_link_is_added_to_that_of_the_machine() -> None:
    device = MeasuredDevice(
        name="CPU",
        memory=1,
        dtype="float32",
        beside_host=False,
        products=(),
        convolutions=(),
        attention=(),
        moving={},
    )
    own = LinkClass(pairs=((0, 1),), latency=1e-4, rate=1e9)
    machine = MeasuredMachine(device=device, devices=2, links=(own,))
    assert with_link(machine, LinkModel()).links[0].rate == pytest.approx(own.rate)
    (slow,) = with_link(machine, LinkModel(latency=1e-3, rate=1e9)).links
    assert (slow.latency, slow.rate) == (pytest.approx(1.1e-3), pytest.approx(5e8))
