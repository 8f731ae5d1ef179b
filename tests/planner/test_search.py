"""The search takes the plan that trying all of them finds, within memory, and leaves devices idle that do not help."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.pipeline.planner.forecast import Forecast, PhaseForecast
from patchpar.pipeline.planner.placement import TRIES, placed
from patchpar.pipeline.planner.plan_order import CLOSE
from patchpar.pipeline.planner.rank_memory import RankMemory
from patchpar.pipeline.planner.search import attention_variants, candidates, edges_of, ranked, search
from patchpar.pipeline.planner.simulate import Simulator
from patchpar.plan.link_model import LinkModel, edges_for
from patchpar.plan.plan import Plan
from patchpar.plan.replay.divided_work import DividedWork
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.measured_machine import LinkClass, MeasuredMachine
from patchpar.plan.replay.price import ASSUMED
from patchpar.plan.replay.replay import Replayed, replay
from patchpar.plan.replay.tape import Boundary, Kernel, Operator, Send, Tape, TapeEntry, Wait
from patchpar.plan.replay.topology import equal_ports
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.exact import ExactPatch
from tests.breadth import first_of
from tests.unit.test_measured_machine import DEVICE

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
    return lambda plan, order=(): forecast_of(plan, machine, **kwargs)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("exchange", "overlap"), [(0.2, True), (0.002, None)], ids=["slow", "fast"])
def test_keys_are_attended_to_as_they_arrive_where_that_hides_a_slow_link(
    exchange: float, overlap: bool | None
) -> None:
    """Own keys meanwhile, for which a step has more to launch and to merge: where a link is fast, all at once."""
    machine = Machine.parse("2xA100")

    def simulate(plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        arriving = getattr(plan.strategy, "overlap", None)
        hidden = min(exchange, 0.1)
        others = plan.strategy not in (ExactPatch(), ExactPatch(overlap=True))
        waits = exchange - hidden if arriving else exchange
        return forecast_of(plan, machine, exchange=1.0 if others else waits, launches=0.02 if arriving else 0.0)

    assert search(machine, 1, "exact", simulate).best.plan == Plan(patch=2, strategy=ExactPatch(overlap=overlap))


def test_weights_that_do_not_fit_are_sharded() -> None:
    """An H100 has 80 GB: four times 25 are too many for one device, and a half or a quarter is not."""
    machine = Machine.parse("4xH100")
    found = search(machine, 1, "exact", simulated(machine, exchange=0.001, weights=100 * 10**9))
    assert found.best.plan == Plan(patch=4, weights="sharded")
    assert not any(each.fits for each in found.ranked if each.plan.weights == "whole")
    with pytest.raises(PlanError, match="no plan fits the memory"):
        search(machine, 1, "exact", simulated(machine, exchange=0.0, weights=10**12)).best  # noqa: B018


def test_one_device_that_lacks_the_memory_copies_weights_from_the_host() -> None:
    """Sharded ones take several devices."""
    machine = Machine.parse("1xRTX4090")

    def simulate(plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        return forecast_of(plan, machine, exchange=0.0, weights=GIB if plan.weights == "hosted" else 30 * GIB)

    found = search(machine, 1, "exact", simulate)
    assert found.best.plan == Plan(weights="hosted")
    assert [each.plan for each in found.ranked] == [Plan(weights="hosted"), Plan()]
    assert not found.refused


def test_where_no_plan_fits_the_nearest_is_named_with_what_is_missing() -> None:
    """Sharded over four devices of 24 GB, 400 GiB of weights are 100 on each, besides tensors and the context."""
    machine = Machine.parse("4xRTX4090")
    found = search(machine, 1, "exact", simulated(machine, exchange=0.0, weights=400 * GIB))
    nearest = min(found.ranked, key=lambda each: each.memory[0].total)
    assert nearest.plan == Plan(patch=4, weights="sharded")
    needed = f"{nearest.memory[0].total / GIB:.1f} GiB on a RTX4090, which has 22.4 GiB"
    with pytest.raises(PlanError, match=f"{nearest.plan} comes nearest, with {needed}"):
        found.best  # noqa: B018 - raises


def test_devices_in_json_are_those_of_ranks_only() -> None:
    """In order or not: idle ones stand in neither."""
    found = forecast_of(Plan(cfg=2), Machine.parse("4xH100"), exchange=0.0)
    assert found.as_dict()["devices"] == [0, 1]
    assert replace(found, order=(3, 1, 0, 2)).as_dict()["devices"] == [3, 1]


def test_a_plan_that_is_refused_with_sharded_weights_only_is_named_so() -> None:
    """Whole weights have a forecast, which says that they do not fit."""
    machine = Machine.parse("2xRTX4090")

    def simulate(plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        if plan.weights == "sharded":
            raise UnsupportedModel("no block to shard")
        return forecast_of(plan, machine, exchange=0.0, weights=30 * GIB)

    found = search(machine, 2, "exact", simulate)
    whole, sharded = Plan(cfg=2), Plan(cfg=2, weights="sharded")
    assert found.refused[str(sharded)] == "no block to shard"
    assert str(whole) not in found.refused
    assert whole in [each.plan for each in found.ranked]


def test_a_refused_plan_is_named_with_its_reason_and_never_chosen() -> None:
    machine = Machine.parse("4xH100")

    def simulate(plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
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


def test_other_ways_of_attention_are_tried_where_keys_make_a_step_longer() -> None:
    """With Ulysses a tenth of the wait is left; where waits are of another kind nothing is tried."""
    machine = Machine.parse("4xH100")

    def simulate(plan: Plan, order: tuple[int, ...] = (), kind: str = "kv") -> Forecast:
        found = forecast_of(plan, machine, exchange=0.03 if plan.strategy == ExactPatch() else 0.003)
        step = replace(found.step, exposed={kind: sum(found.step.exposed.values())})
        return replace(found, step=step)

    found = search(machine, 1, "exact", simulate)
    assert found.best.plan.patch == 4
    assert found.best.plan.strategy != ExactPatch()
    assert found.best.step.seconds == min(each.step.seconds for each in found.ranked)
    halos = search(machine, 1, "exact", lambda plan, order=(): simulate(plan, order, "halo"))
    assert all(each.plan.strategy == ExactPatch() for each in halos.ranked)
    asked = list(attention_variants(Plan(patch=4, strategy=ExactPatch(attention="ring"))))
    assert asked == list(attention_variants(Plan(cfg=2))) == []


def test_a_plan_without_axis_patch_counts_as_equal_within_five_percent() -> None:
    machine = Machine.parse("2xH100")
    times = {Plan(): 1.0, Plan(cfg=2): 0.54, Plan(patch=2): 0.52}
    found = [forecast_of(plan, machine, 0.0) for plan in times]
    found = [replace(each, step=replace(each.step, seconds=times[each.plan])) for each in found]
    assert ranked(found)[0].plan == Plan(cfg=2)
    slower = [replace(each, step=replace(each.step, seconds=2 * each.step.seconds)) for each in found[1:]]
    assert ranked([found[0], *slower])[0].plan == Plan()


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_is_slower_than_one_device(seed: int) -> None:
    choice, machine = random.Random(seed), Machine.parse("8xH100")
    times = {plan: choice.uniform(0.9, 1.1) for plan in (Plan(), *candidates(8, 2, "exact"))}
    found = [forecast_of(plan, machine, 0.0) for plan in times]
    found = [replace(each, step=replace(each.step, seconds=times[each.plan])) for each in found]
    assert ranked(found)[0].step.seconds <= times[Plan()]


def test_launches_that_cannot_be_divided_end_the_search() -> None:
    machine, asked = Machine.parse("8xH100"), list[Plan]()

    def simulate(plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        asked.append(plan)
        return replace(forecast_of(plan, machine, 0.0), launching=1.0)

    assert search(machine, 1, "exact", simulate).best.plan == Plan()
    assert asked == [Plan()]
    search(machine, 2, "exact", simulate)  # in one call both branches have the launches of one
    assert asked == [Plan(), Plan(), Plan(cfg=2)]


def test_ranks_are_placed_where_links_are_fast() -> None:
    """Devices 0 and 2, and 1 and 3, have fast links: the two ranks that exchange sit on such a pair."""
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    fast = LinkClass(pairs=((0, 2), (1, 3)), latency=0.0, rate=100.0)
    slow = LinkClass(pairs=tuple(each for each in pairs if each not in fast.pairs), latency=0.0, rate=1.0)
    machine = MeasuredMachine(device=DEVICE, devices=4, links=(fast, slow))
    tried = []

    def simulate(plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        tried.append(order)
        a, b = sorted((order or (0, 1))[:2])
        waits = 10.0 if (a, b) in slow.pairs else 0.1
        found = forecast_of(plan, machine, 0.0)  # type: ignore[arg-type]
        return replace(found, step=replace(found.step, seconds=waits), order=order)

    found = placed(simulate(Plan(patch=2)), 4, simulate)
    assert sorted(found.order[:2]) in ([0, 2], [1, 3])
    assert len(tried) <= TRIES + 1
    assert not machine.is_uniform
    assert Machine.parse("8xH100").is_uniform
    assert not Machine.parse("2x(4xH100)-eth100").is_uniform


@pytest.mark.parametrize("name", first_of(["4xH100-nvlink", "4xRTX4090-pcie4", "4xL20-pcie4"]))
@pytest.mark.parametrize("graphs", [True, None])
def test_plans_of_a_real_model_that_are_not_recorded_could_not_have_won(
    tmp_path: Path, name: str, graphs: bool | None
) -> None:
    """Against recording and replaying all: the same best plan, and the same seconds of all that are replayed."""
    call = {"height": 128, "width": 128}
    options = {"torch_dtype": "float16", "graphs": graphs}
    simulator = Simulator("embedded", name, options, call, VerificationCache(tmp_path))
    found = search(simulator.machine, simulator.call.branches, "exact", simulator.of)
    every = [simulator.of(plan) for plan in (Plan(), *candidates(4, simulator.call.branches, "exact"))]
    assert found.skipped
    assert found.best.plan == ranked(every)[0].plan
    seconds = {each.plan: each.step.seconds for each in every}
    assert all(each.step.seconds == seconds[each.plan] for each in found.ranked if each.plan in seconds)
    assert all(seconds[plan] * CLOSE >= found.best.step.seconds for plan in found.skipped)


def test_without_a_choice_steps_of_several_gpus_are_priced_as_graphs(tmp_path: Path) -> None:
    """As a pipeline runs them; features and weights that are divided leave no graphs."""
    plans = [Plan(), Plan(cfg=2), Plan(patch=2), Plan(patch=2, weights="sharded")]
    one, cfg, patch, sharded = ([], [], [], [])
    for graphs in (None, True, False):
        options = {"torch_dtype": "float16", "graphs": graphs}
        found = Simulator("embedded", "2xH100", options, {"height": 64, "width": 64}, VerificationCache(tmp_path))
        for seconds, plan in zip((one, cfg, patch, sharded), plans, strict=True):
            seconds.append(found.of(plan).step.seconds)
    for default, always, never in (cfg, patch):
        assert default == always < never
    assert one[0] == one[2] > one[1]
    assert len(set(sharded)) == 1


def test_a_kernel_of_few_rows_is_not_shorter_with_fewer() -> None:
    """A product of one tile; a copy is divided, but for the gap to the kernel before."""
    device = Machine.parse("H100").device
    product = Operator("mm", "float16", 2 * 128 * 128 * 1024, 0, (128, 128, 1024))
    copy = Operator("copy_", "float16", 0, 10**9)
    (of_product, of_copy) = (DividedWork.of([each], device) for each in (product, copy))
    assert of_product.seconds(2) == pytest.approx(of_product.seconds(1))
    assert of_copy.seconds(4) - ASSUMED.gap == pytest.approx((of_copy.seconds(1) - ASSUMED.gap) / 4)
    assert DividedWork.of([product, product, copy], device).seconds(1) == pytest.approx(
        2 * of_product.seconds(1) + of_copy.seconds(1)
    )


def test_a_model_that_fits_no_device_is_divided_by_features_and_blocks() -> None:
    """Features only where the first call, which takes whole weights, has room for them."""
    machine = Machine.parse("2xH100")
    whole = search(machine, 1, "exact", simulated(machine, exchange=0.1, weights=100 * 10**9))
    assert any(each.plan == Plan(stage=2, weights="hosted") for each in whole.ranked)
    assert "takes whole weights" in whole.refused[str(Plan(tensor=2))]
    tight = search(machine, 1, "exact", simulated(machine, exchange=0.1, weights=79 * 10**9 + GIB // 2))
    assert any(each.plan == Plan(tensor=2) for each in tight.ranked)
    small = search(machine, 1, "exact", simulated(machine, exchange=0.1))
    assert not any(each.plan.stage * each.plan.tensor > 1 for each in small.ranked)


ROUNDS, EDGES = 60, 6e6


@pytest.mark.parametrize(
    ("latency", "rate"),
    [(0.0, 1e18), (1e-3, 1e18), (1.6e-3, 1e18), (1.9e-3, 1e18), (5e-3, 1e18), (0.0, EDGES / 0.09), (0.0, EDGES / 0.12)],
)
def test_edges_by_replay_are_those_of_the_rule(latency: float, rate: float) -> None:
    """Two ranks exchange halos in rounds, with a step of one second in all between them."""
    rounds: list[Tape] = []
    for rank in range(2):
        step: list[TapeEntry] = [Boundary("step 0", is_step=True)]
        for number in range(ROUNDS):
            exchange = Send(number, (1 - rank,), "halo", int(EDGES / ROUNDS)), Wait(number, 1 - rank, 0, "", "halo")
            step += [*exchange, Kernel("compute", 1 / ROUNDS)]
        rounds.append(tuple(step))
    replayed = replay(rounds, equal_ports(rate, latency))
    waits = sum(each.seconds for each in replayed.intervals if each.rank == 0 and each.kind == "halo")
    found = forecast_of(Plan(patch=2), Machine.parse("2xH100"), 0.0)
    timed = replace(found.step, seconds=1.0 + waits, exposed={"moments+halo": waits, "kv": 9.0})
    link = LinkModel(latency=latency, rate=rate)
    rule = edges_for(link, rounds=ROUNDS, edge_bytes=EDGES, step_seconds=1.0 + waits)
    assert edges_of(replace(found, step=timed)).edges == rule.edges
    assert edges_of(replace(found, step=replace(timed, exposed={"kv": 9.0}))).edges == "fresh"
