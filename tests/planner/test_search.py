"""The search takes the plan that trying all of them finds, within memory, and leaves devices idle that do not help."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.pipeline.planner.forecast import Forecast, PhaseForecast, RankMemory
from patchpar.pipeline.planner.search import CLOSE, candidates, fits, ranked, search
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.replay import Replayed

GIB = 2**30


def forecast_of(plan: Plan, machine: Machine, exchange: float, weights: int = GIB, launches: float = 0.0) -> Forecast:
    """A step of one second, divided by the ranks, with so many seconds of exchange where there is axis patch."""
    waits = exchange * (plan.patch - 1)
    compute = 1.0 / plan.world_size
    step = PhaseForecast(seconds=compute + waits + launches, compute=compute, launch=launches, exposed={"kv": waits})
    held = weights // plan.world_size if plan.weights == "sharded" else weights
    return Forecast(
        plan=plan,
        machine=machine,
        steps=1,
        warm_up_steps=0,
        phases={},
        first=step,
        step=step,
        bytes_sent=[{"kv": plan.patch - 1}],
        memory=[RankMemory(weights=held, tensors=GIB)],
        assumed=(),
        replayed=Replayed((), (), ()),
    )


def simulated(machine: Machine, **kwargs: float) -> Callable[[Plan], Forecast]:
    return lambda plan: forecast_of(plan, machine, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("exchange", [0.0, 0.003, 0.05, 0.4, 2.0])
@pytest.mark.parametrize("launches", [0.0, 0.5])
@pytest.mark.parametrize("name", ["1xH100", "6xH100", "8xA100"])
def test_the_best_plan_is_that_of_trying_all(name: str, exchange: float, launches: float) -> None:
    machine = Machine.parse(name)
    simulate = simulated(machine, exchange=exchange, launches=launches)
    every = [simulate(plan) for plan in (Plan(), *candidates(machine.devices, 2, "exact"))]
    found = search(machine, 2, "exact", simulate)
    assert found.best.plan == ranked(every)[0].plan
    assert found.best.step.seconds <= CLOSE * min(each.step.seconds for each in every)
    assert search(machine, 2, "exact", simulate) == found


def test_devices_that_do_not_help_stay_idle() -> None:
    machine = Machine.parse("8xH100")
    assert search(machine, 1, "exact", simulated(machine, exchange=2.0)).best.plan == Plan()
    assert search(machine, 2, "exact", simulated(machine, exchange=2.0)).best.plan == Plan(cfg=2)
    assert search(machine, 2, "exact", simulated(machine, exchange=0.0)).best.plan.world_size == 8


def test_of_about_equal_times_the_plan_with_fewer_devices_is_taken() -> None:
    machine = Machine.parse("8xH100")
    found = search(machine, 1, "exact", simulated(machine, exchange=0.0, launches=100.0))
    assert found.best.plan == Plan()


def test_weights_that_do_not_fit_are_sharded() -> None:
    """An H100 has 80 GB: four times 25 are too many for one device, and a half or a quarter is not."""
    machine = Machine.parse("4xH100")
    found = search(machine, 1, "exact", simulated(machine, exchange=0.001, weights=100 * 10**9))
    assert found.best.plan == Plan(patch=4, weights="sharded")
    assert not any(fits(each) for each in found.ranked if each.plan.weights == "whole")
    with pytest.raises(PlanError, match="no plan fits the memory"):
        search(machine, 1, "exact", simulated(machine, exchange=0.0, weights=10**12)).best  # noqa: B018


def test_a_refused_plan_is_named_with_its_reason_and_never_chosen() -> None:
    machine = Machine.parse("4xH100")

    def simulate(plan: Plan) -> Forecast:
        if plan.patch > 2:
            raise UnsupportedModel("two bands at most")
        return forecast_of(plan, machine, exchange=0.0)

    found = search(machine, 2, "exact", simulate)
    assert found.best.plan == Plan(cfg=2, patch=2)
    assert found.refused[str(Plan(patch=4))] == "two bands at most"
    assert all(each.plan.patch <= 2 for each in found.ranked)


def test_more_devices_are_never_slower() -> None:
    seconds = []
    for devices in range(1, 9):
        machine = Machine.parse(f"{devices}xH100")
        seconds.append(search(machine, 2, "exact", simulated(machine, exchange=0.02)).best.step.seconds)
    assert all(after <= CLOSE * min(seconds[:number]) for number, after in enumerate(seconds) if number)


def test_plans_skipped_could_not_have_won() -> None:
    machine = Machine.parse("8xH100")
    simulate = simulated(machine, exchange=0.0)
    found = search(machine, 2, "exact", simulate)
    assert found.skipped
    assert all(simulate(plan).step.seconds > CLOSE * found.best.step.seconds for plan in found.skipped)
