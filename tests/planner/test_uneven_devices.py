"""Devices of several kinds in one machine: the fastest are used, with parts of the image by speed, or stay idle."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from patchpar.pipeline.planner.forecast import Forecast, PlanForecasts
from patchpar.pipeline.planner.image_ranks import ranks_of_image
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.search import CLOSE, search
from patchpar.pipeline.planner.simulate import Simulator
from patchpar.pipeline.planner.uneven_devices import UnevenDevices, computing
from patchpar.plan.bands import starts_of
from patchpar.plan.part_ratio import UNITS, ratio_of
from patchpar.plan.plan import Plan
from patchpar.plan.replay.device_catalogue import DEVICES
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.measured_machine import LinkClass, MeasuredMachine
from patchpar.plan.replay.price import AS_GRAPH, ASSUMED
from patchpar.plan.replay.tape import Boundary, Operator, Send, Wait
from patchpar.shard.verification_cache import VerificationCache
from tests.unit.test_measured_machine import DEVICE

ROWS = 128
BYTES = 2 * 10**8
"""Of a kernel that the memory limits, for each row."""


def recorded(plan: Plan, sent: int, rank: int) -> RecordedRank:
    """A step in which each rank copies its rows, `sent` bytes go to each other rank, and something is not divided."""
    starts = starts_of(ROWS, plan.patch, plan.ratio)
    patch = rank % plan.patch
    rows = starts[patch + 1] - starts[patch]
    others = [each for each in range(rank - patch, rank - patch + plan.patch) if each != rank]
    tape = (
        Boundary("step 0", is_step=True),
        Operator("copy_", "float16", 0, rows * BYTES * (2 if plan.cfg == 1 else 1)),
        Operator("copy_", "float16", 0, BYTES),
        *(Send(0, (each,), "kv", max(1, sent), "attn") for each in others),
        *(Wait(0, each, max(1, sent), "attn", "kv") for each in others),
        Boundary("decode", is_step=True),
    )
    return RecordedRank(rank=rank, tape=tape, peaks={"denoise": 1}, working={"denoise": 1}, weight_bytes={"unet": 1})


class Simulated:
    """Forecasts of such steps, without a model."""

    def __init__(self, machine: Machine | MeasuredMachine, sent: int = 0) -> None:
        self.machine, self._sent, self.asked = machine, sent, list[Plan]()

    def __call__(self, plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        self.asked.append(plan)
        ranks = ranks_of_image(plan, partial(recorded, plan, self._sent))
        return PlanForecasts(ranks, plan, self.machine, steps=1, warm_up_steps=0).on(order)


def test_the_parts_are_in_proportion_to_speeds() -> None:
    assert ratio_of([3.0, 1.0]) == (3, 1)
    assert ratio_of([1.0, 1.0]) == (1, 1)
    assert ratio_of([1000.0, 1.0]) == (UNITS, 1)


@pytest.mark.parametrize("name", ["1xRTX5090+1xRTX4090", "1xL40+1xH100", "2xA100+1xL40", "1xH20+1xRTX4090+1xL40"])
def test_the_step_is_within_a_row_of_that_of_the_best_ratio(name: str) -> None:
    """Of two ranks every division of the rows is tried; of three the ranks compute about as long."""
    machine = Machine.parse(name)
    simulate = Simulated(machine)
    found = search(machine, 1, "exact", simulate).best
    assert found.plan.world_size == machine.devices
    assert found.plan.ratio
    if machine.devices == 2:
        best = min(
            simulate(Plan(patch=2, ratio=(rows, ROWS - rows)), found.order).step.seconds for rows in range(1, ROWS)
        )
        assert found.step.seconds <= best * (1 + 2 / ROWS)
    seconds = computing(found)
    assert max(seconds.values()) <= 1.1 * min(seconds.values())
    even = simulate(replace(found.plan, ratio=()), found.order)
    assert found.step.seconds < even.step.seconds, "the control: equal parts are slower"


def test_a_slow_device_stays_idle_where_it_does_not_help() -> None:
    """Sending takes longer than what a device with a tenth of the speed would compute."""
    machine = Machine.parse("1xL40+1xH100")
    assert search(machine, 1, "exact", Simulated(machine, sent=10**10)).best.plan == Plan()
    assert search(machine, 1, "exact", Simulated(machine, sent=10**10)).best.order[0] == 1, "the faster one"
    machine = Machine.parse("1xRTX4090+2xH100")
    found = search(machine, 1, "exact", Simulated(machine, sent=10**7)).best
    assert found.plan.world_size in (2, 3)
    assert set(found.order[:2]) == {1, 2}


def test_guidance_branches_of_a_part_sit_on_devices_of_equal_speed() -> None:
    machine = Machine.parse("1xL40+2xH100+1xL40")
    found = UnevenDevices(machine, Simulated(machine))(Plan(cfg=2, patch=2))
    assert [found.device_of(rank).name for rank in range(4)] == ["H100", "L40"] * 2
    assert found.plan.ratio[0] > found.plan.ratio[1]


class Captured(Simulated):
    """Steps of several ranks are graphs; on one device the process takes longer to launch them than any device."""

    def __call__(self, plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        self.asked.append(plan)
        ranks = ranks_of_image(plan, partial(recorded, plan, self._sent))
        if plan.world_size > 1:
            return PlanForecasts(ranks, plan, self.machine, steps=1, warm_up_steps=0, assumed=AS_GRAPH).on(order)
        waits = replace(ASSUMED, launch=1.0)
        alone = PlanForecasts(ranks, plan, self.machine, steps=1, warm_up_steps=0, assumed=waits).on(order)
        return replace(alone, launching=0.0)


def test_devices_that_wait_for_launches_alone_have_parts_by_their_kernels() -> None:
    """By whole steps they would be about as fast as each other, and a slower one might be taken first."""
    machine = Machine.parse("1xL40+2xH100")
    simulate = Captured(machine)
    alone = [simulate(Plan(), (number, *({0, 1, 2} - {number}))).step.seconds for number in (0, 1)]
    assert alone[0] == pytest.approx(alone[1], rel=0.1)
    found = UnevenDevices(machine, simulate)
    assert set(found(Plan(patch=2)).order[:2]) == {1, 2}
    seconds = computing(found(Plan(patch=3)))
    assert max(seconds.values()) <= 1.1 * min(seconds.values())


def test_devices_as_fast_alone_have_other_parts_where_one_computes_longer() -> None:
    """As where a process launches what one device does, and the part of a rank is too large to wait for launches."""
    machine = Machine.parse("1xL40+1xH100")

    class AsFast(Simulated):
        def __call__(self, plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
            found = super().__call__(plan, order)
            return found if plan.patch > 1 else replace(found, step=replace(found.step, seconds=1.0))

    found = UnevenDevices(machine, AsFast(machine))(Plan(patch=2))
    assert found.plan.parts[found.order.index(1)] > found.plan.parts[found.order.index(0)]


@pytest.mark.parametrize("seed", range(8))
def test_no_subset_of_the_devices_is_faster(seed: int) -> None:
    """Against every set of devices with parts by speed, for random machines of three devices."""
    choice = random.Random(seed)
    machine = Machine.parse("+".join(choice.choice(DEVICES).name for _ in range(3)))
    simulate = Simulated(machine, sent=choice.choice([1, 10**8, 10**9]))
    found = search(machine, 1, "exact", simulate).best
    rates = [machine.device_at(number).memory_rate for number in range(3)]
    for count in (1, 2, 3):
        for taken in combinations(range(3), count):
            plan = Plan(patch=count, ratio=ratio_of([rates[each] for each in taken]) if count > 1 else ())
            order = (*taken, *(each for each in range(3) if each not in taken))
            assert found.step.seconds <= 1.05 * CLOSE * simulate(plan, order).step.seconds


def measured_of(*scales: float, latency: float = 1e-5) -> MeasuredMachine:
    """Devices whose kernels take so many times as long, each kind with a name of its own."""
    devices = tuple(replace(DEVICE, name=f"kind {scale:g}", scale=scale, memory=2**40) for scale in scales)
    pairs = tuple(combinations(range(len(scales)), 2))
    links = (LinkClass(pairs=pairs, latency=latency, rate=1e10),)
    return MeasuredMachine(device=devices[0], devices=len(devices), links=links, mixed=devices)


def test_measured_devices_of_several_kinds_have_parts_by_speed_in_the_order_of_devices() -> None:
    """As `plan="auto"` takes them: ranks are in ascending order. Control: taken as alike, the slow one ends last."""
    machine = measured_of(3.0, 1.0, 1.5)
    found = search(machine, 1, "exact", Simulated(machine), in_order=True).best
    assert found.order == (0, 1, 2)
    assert found.plan.ratio[1] > found.plan.ratio[2] > found.plan.ratio[0]
    even = Simulated(machine)(Plan(patch=3), found.order)
    assert found.step.seconds < 0.8 * even.step.seconds
    assert search(machine, 1, "exact", Simulated(machine)).best.order == (1, 2, 0), "the fastest first"


def test_guidance_branches_in_the_order_of_devices_have_parts_for_the_slower_one() -> None:
    machine = measured_of(1.0, 2.0, 1.0, 4.0)
    found = UnevenDevices(machine, Simulated(machine), in_order=True)(Plan(cfg=2, patch=2))
    assert found.order == (0, 1, 2, 3)
    assert found.plan.ratio[0] > 2 * found.plan.ratio[1]


def test_measured_devices_that_do_not_help_stay_idle() -> None:
    machine = measured_of(9.0, 1.0, latency=1e3)
    found = search(machine, 1, "exact", Simulated(machine), in_order=True).best
    assert (found.plan, found.order) == (Plan(), (1, 0))


def test_equal_devices_have_no_ratio() -> None:
    machine = Machine.parse("3xL40")
    simulate = Simulated(machine)
    search(machine, 1, "exact", simulate)
    assert any(plan.patch == 3 for plan in simulate.asked)
    assert not any(plan.ratio for plan in simulate.asked)


def test_images_on_devices_of_several_kinds_are_all_replayed() -> None:
    """The second image is on the slower device, and ends the call."""
    one = Simulated(Machine.parse("1xL40+1xH100"))
    slow, both = one(Plan()), one(Plan(data=2))
    fast = one(Plan(), (1, 0))
    assert fast.step.seconds < slow.step.seconds == both.step.seconds


def test_memory_is_that_of_the_device_of_each_rank() -> None:
    one = Simulated(Machine.parse("1xL40+1xRTX4090"))
    found = one(Plan())
    large = replace(found, memory=[replace(found.memory[0], weights=40 * 10**9)])
    assert large.fits
    assert not replace(large, order=(1, 0)).fits


@pytest.mark.breadth
def test_a_real_model_on_two_cards_has_the_larger_part_on_the_faster(tmp_path: Path) -> None:
    options: dict[str, Any] = {"torch_dtype": "float16"}
    call = {"height": 1024, "width": 1024}
    simulator = Simulator("embedded", "1xRTX4090+1xH100-pcie5", options, call, VerificationCache(tmp_path))
    found = search(simulator.machine, 1, "exact", simulator.of)
    forecasts = [each for each in found.ranked if each.plan.patch == 2]
    assert forecasts
    assert all(each.plan.ratio and each.plan.ratio[0] > each.plan.ratio[1] for each in forecasts)
    assert all(each.order == (1, 0) for each in forecasts)
