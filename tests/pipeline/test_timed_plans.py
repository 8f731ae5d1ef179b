"""plan="auto" takes the plan with the shortest predicted step where the machine was measured, and corrects itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline
from patchpar.errors import PlanError
from patchpar.pipeline import timed_plans
from patchpar.pipeline.auto_plan import PlanChoice
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.planner.forecast import Forecast
from patchpar.pipeline.planner.kept_tapes import KeptTapes
from patchpar.pipeline.planner.tape_recorder import DECODE
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.pipeline.rank_stats import RankStats, StepStats
from patchpar.pipeline.report import Run
from patchpar.pipeline.state import PipelineState, set_event
from patchpar.pipeline.timed_plans import TimedPlans
from patchpar.plan.plan import Plan
from patchpar.plan.replay.measured_device import KernelRate, MeasuredDevice
from patchpar.plan.replay.measured_machine import LinkClass, MeasuredMachine
from patchpar.shard.torch_switches import TorchModes
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.exact import ExactPatch
from tests.planner.test_search import forecast_of
from tests.planner.test_uneven_devices import Simulated, measured_of
from tests.unit.test_measured_machine import DEVICE

DEVICES = ("cpu", "cpu")
LINKS = (LinkClass(pairs=((0, 1),), latency=1e-5, rate=1e9),)
MACHINE = MeasuredMachine(device=replace(DEVICE, memory=2**40), devices=2, links=LINKS)
RULE = PlanChoice(Plan(patch=2), "the rule")
GUIDED: Any = SimpleNamespace(branches=lambda kwargs: 2, splits_into_bands=True, splits_into_tokens=False)
CALL = {"prompt": "a fox", "height": 64}
Simulate = Callable[[Plan], Forecast]


@pytest.fixture
def kept(tmp_path: Path) -> KeptMachines:
    found = KeptMachines(VerificationCache(tmp_path / "machines"))
    found.keep(DEVICES, MACHINE)
    return found


def simulator(machine: MeasuredMachine, of: Any) -> Any:
    """One that simulates so, and keeps nothing."""
    return SimpleNamespace(of=of, machine=machine, kept=KeptTapes(None, {}))


def timed(
    monkeypatch: pytest.MonkeyPatch, kept: KeptMachines, simulate: Simulate, folder: str | None = "model"
) -> TimedPlans:
    def of(plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        return simulate(plan)

    monkeypatch.setattr(timed_plans, "Simulator", lambda *given: simulator(given[1], of))
    return TimedPlans(folder, {"torch_dtype": torch.float16}, DEVICES, kept)


def with_exchange(seconds: float) -> Simulate:
    return lambda plan: forecast_of(plan, MACHINE, seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("exchange", [0.0, 5.0])
def test_the_plan_of_the_shortest_step_is_taken(
    monkeypatch: pytest.MonkeyPatch, kept: KeptMachines, exchange: float
) -> None:
    found = timed(monkeypatch, kept, with_exchange(exchange)).better(RULE, GUIDED, CALL)
    assert found.plan == Plan(cfg=2)
    assert "as measured" in found.reason


def test_devices_that_make_a_call_slower_stay_idle(monkeypatch: pytest.MonkeyPatch, kept: KeptMachines) -> None:
    alone: Any = SimpleNamespace(branches=lambda kwargs: 1, splits_into_bands=True, splits_into_tokens=False)
    assert timed(monkeypatch, kept, with_exchange(5.0)).better(RULE, alone, CALL).plan == Plan()
    assert timed(monkeypatch, kept, with_exchange(0.0)).better(RULE, alone, CALL).plan == Plan(patch=2)


def test_the_ranks_of_devices_of_several_kinds_are_named(monkeypatch: pytest.MonkeyPatch, kept: KeptMachines) -> None:
    """The first device is slow, and links are: the call runs on the second alone."""
    machine = measured_of(9.0, 1.0, latency=1e3)
    kept.keep(DEVICES, machine)
    simulate = Simulated(machine)
    monkeypatch.setattr(timed_plans, "Simulator", lambda *given: simulator(given[1], simulate))
    alone: Any = SimpleNamespace(branches=lambda kwargs: 1, splits_into_bands=True, splits_into_tokens=False)
    found = TimedPlans("model", {}, DEVICES, kept).better(RULE, alone, CALL)
    assert (found.plan, found.ranks) == (Plan(), (1,))


@pytest.mark.parametrize(
    ("choice", "call"),
    [
        (PlanChoice(Plan(data=2), "prompts"), CALL),
        (PlanChoice(Plan(patch=2, weights="sharded"), "memory"), CALL),
        (PlanChoice(Plan(patch=2, strategy="structure"), "size"), CALL),
        (RULE, {"prompt": ["a", "b"]}),
        (RULE, {**CALL, "image": object()}),
    ],
)
def test_what_has_no_forecast_keeps_its_rule(
    monkeypatch: pytest.MonkeyPatch, kept: KeptMachines, choice: PlanChoice, call: dict[str, Any]
) -> None:
    assert timed(monkeypatch, kept, with_exchange(5.0)).better(choice, GUIDED, call) is choice


def test_without_a_measurement_the_rule_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing = KeptMachines(VerificationCache(tmp_path / "nothing"))
    plans = timed(monkeypatch, nothing, with_exchange(5.0))
    assert plans.better(RULE, GUIDED, CALL) is RULE
    with pytest.raises(PlanError, match="patchpar tune --devices cpu:2"):
        plans.planned(GUIDED, CALL)


def test_a_model_that_cannot_be_recorded_keeps_its_rule_and_says_why(
    monkeypatch: pytest.MonkeyPatch, kept: KeptMachines
) -> None:
    tried = []

    def refuse(plan: Plan) -> Forecast:
        tried.append(plan)
        raise PlanError("it needs values")

    plans = timed(monkeypatch, kept, refuse)
    for _ in range(2):
        found = plans.better(RULE, GUIDED, CALL)
        assert found.plan == RULE.plan
        assert found.reason == "the rule; no forecast: it needs values"
    assert tried == [Plan()], "a call like it is not searched again"


def test_where_no_plan_fits_by_forecast_the_rule_stays(monkeypatch: pytest.MonkeyPatch, kept: KeptMachines) -> None:
    """A measurement knows the memory that was free when it was made."""
    small = replace(MACHINE, device=replace(DEVICE, memory=1))
    kept.keep(DEVICES, small)
    plans = timed(monkeypatch, kept, lambda plan: forecast_of(plan, small, 0.0))  # type: ignore[arg-type]
    found = plans.better(RULE, GUIDED, CALL)
    assert found.plan == RULE.plan
    assert "no forecast: no plan fits the memory" in found.reason


def test_a_call_is_planned_without_being_made(monkeypatch: pytest.MonkeyPatch, kept: KeptMachines) -> None:
    plans = timed(monkeypatch, kept, with_exchange(0.3))
    found = plans.planned(GUIDED, CALL | {"num_inference_steps": 7})
    assert found.plan == Plan(cfg=2)
    assert found.forecast.seconds == pytest.approx(7 * found.forecast.step.seconds)
    assert found.others
    assert all(each.step.seconds >= found.forecast.step.seconds for each in found.others)
    with pytest.raises(PlanError, match="a call with image has no forecast"):
        plans.planned(GUIDED, CALL | {"image": 1})
    with pytest.raises(PlanError, match="from a folder"):
        timed(monkeypatch, kept, with_exchange(0.3), None).planned(GUIDED, CALL)


SECONDS = 20.0


def test_others_go_on_while_plans_are_searched_for(monkeypatch: pytest.MonkeyPatch, kept: KeptMachines) -> None:
    """A search of a large model takes minutes; two calls that are alike make one."""
    searching, go_on, searches = threading.Event(), threading.Event(), []

    def simulate(plan: Plan) -> Forecast:
        searches.append(plan)
        searching.set()
        assert go_on.wait(SECONDS)
        return with_exchange(0.3)(plan)

    options: Any = SimpleNamespace(plan="auto")
    state: Any = PipelineState(options)
    state.model, state.executor = GUIDED, SimpleNamespace(world_size=2, kind="local")
    state.timed = timed(monkeypatch, kept, simulate)
    with ThreadPoolExecutor(3) as pool:
        chosen = [pool.submit(state.choose, lambda *_: RULE, None, CALL) for _ in range(2)]
        try:
            assert searching.wait(SECONDS)
            pool.submit(lambda: (state.follow(set_event()), state.ended(run(1.0), CALL, busy=1.0))).result(SECONDS)
        finally:
            go_on.set()
        assert [each.result(SECONDS).plan for each in chosen] == [Plan(cfg=2)] * 2
    assert searches.count(Plan()) == 1


STEP = StepStats(bytes_sent={}, bytes_received={}, seconds_waited={})


def run(seconds: float, steps: int = 1) -> Run:
    ranks = [
        RankStats(rank=rank, device="cpu", bytes_sent={}, bytes_received={}, seconds_waited={}, steps=(STEP,) * steps)
        for rank in range(2)
    ]
    return Run(plan=Plan(cfg=2), seconds=seconds, ranks=tuple(ranks))


@pytest.mark.parametrize(
    ("ratios", "scale"),
    [
        ((9.0, 1.1, 0.9), 1.0),  # the first call verifies
        ((9.0, 2.0, 2.0), 2.0),
        ((1.0, 2.0, 1.0, 2.0), 1.0),  # not in a row
        ((1.0, 2.0, 0.5), 1.0),  # not in one direction
        ((1.0, 0.5, 0.5, 1.0), 0.5),
    ],
)
def test_two_calls_in_a_row_that_are_off_correct_the_measurement(
    monkeypatch: pytest.MonkeyPatch, kept: KeptMachines, ratios: tuple[float, ...], scale: float
) -> None:
    plans = timed(monkeypatch, kept, with_exchange(0.3))
    forecast = plans.planned(GUIDED, CALL).forecast.seconds
    for ratio in ratios:
        plans.planned(GUIDED, CALL)
        found = plans.compared(run(ratio * forecast), CALL, ratio * forecast)
        assert found.forecast == pytest.approx(forecast)
        assert " s predicted)" in str(found)
    assert kept.of(DEVICES).device.scale == pytest.approx(scale * DEVICE.scale)


def test_a_callback_has_no_effect_on_the_plan_but_on_the_time(
    monkeypatch: pytest.MonkeyPatch, kept: KeptMachines
) -> None:
    plans, call = timed(monkeypatch, kept, with_exchange(0.3)), {**CALL, "callback_on_step_end": print}
    assert plans.better(RULE, GUIDED, call) == plans.better(RULE, GUIDED, CALL) != RULE
    assert plans.compared(run(1.0), CALL, 1.0).forecast is not None
    assert plans.compared(run(1.0), call, 1.0).forecast is None


@pytest.mark.parametrize("busy", [0.6, None])
def test_a_wait_for_ranks_and_a_job_that_goes_on_correct_nothing(
    monkeypatch: pytest.MonkeyPatch, kept: KeptMachines, busy: float | None
) -> None:
    """Jobs that wait for one another take several times their forecast, from call to image."""
    plans = timed(monkeypatch, kept, with_exchange(0.3))
    forecast = plans.planned(GUIDED, CALL).forecast.seconds
    assert forecast == pytest.approx(0.5)
    for _ in range(4):
        assert plans.compared(run(3.0), CALL, busy).forecast == pytest.approx(forecast)
    assert kept.of(DEVICES).device.scale == DEVICE.scale


def test_forecasts_are_of_whole_calls_in_the_dtype_of_the_networks() -> None:
    """Not of one that goes on, that decodes on the way, or that computes under autocast."""
    assert CallOptions(plan=Plan()).is_forecast
    under_autocast = {"modes": TorchModes(autocast={"cpu": "bfloat16"})}
    for differs in ({"recorded": (None,)}, {"decoded_previews": 1}, under_autocast):
        assert not CallOptions(plan=Plan(), **differs).is_forecast  # type: ignore[arg-type]


def test_a_forecast_is_compared_for_what_a_call_has_made(monkeypatch: pytest.MonkeyPatch, kept: KeptMachines) -> None:
    """A scheduler may make another number of steps, as one of second order does, and latents are not decoded."""

    def simulate(plan: Plan) -> Forecast:
        found = with_exchange(0.3)(plan)
        return replace(found, phases={DECODE: replace(found.step, seconds=9.0)})

    plans = timed(monkeypatch, kept, simulate)
    step = plans.planned(GUIDED, CALL).forecast.step.seconds
    latents = {**CALL, "output_type": "latent", "num_inference_steps": 4}
    for call, around in ((latents, 0.0), ({**CALL, "num_inference_steps": 4}, 9.0)):
        for _ in range(3):
            took = 7 * step + around
            assert plans.compared(run(took, steps=7), call, took).forecast == pytest.approx(took)
    assert kept.of(DEVICES).device.scale == DEVICE.scale


def test_a_call_without_a_forecast_has_none(monkeypatch: pytest.MonkeyPatch, kept: KeptMachines) -> None:
    assert timed(monkeypatch, kept, with_exchange(0.3)).compared(run(1.0), CALL, 1.0).forecast is None


SLOW_ATTENTION = (KernelRate(dims=(256, 64), rate=1e7),)  # so that there is something to hide a wait behind
GPU = replace(DEVICE, name="GPU", memory=2**40, beside_host=True, attention=SLOW_ATTENTION)
AT_ONCE = Plan(patch=2)
IN_PARTS = Plan(patch=2, strategy=ExactPatch(overlap=True))


def linked(rate: float, device: MeasuredDevice = GPU) -> MeasuredMachine:
    """Two devices with a link of so many bytes per second."""
    links = (LinkClass(pairs=((0, 1),), latency=1e-6, rate=rate),)
    return MeasuredMachine(device=device, devices=2, links=links)


FAST, SLOW = linked(1e15), linked(1e6)


@pytest.fixture
def tapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("tapes")
def test_keys_of_a_plan_that_was_asked_for_are_attended_to_as_they_arrive_where_the_link_is_slow(
    kept: KeptMachines,
) -> None:
    """By a replay of the embedded model, which `patchpar plan` makes too. What is decided stays in this process."""
    found = {}
    for machine in (FAST, SLOW):
        kept.keep(DEVICES, machine)
        plans = TimedPlans("embedded", {}, DEVICES, kept)
        choice = found[machine.links[0].rate] = plans.overlapped(AT_ONCE, (0, 1), CALL)
        kept.keep(DEVICES, SLOW if machine is FAST else FAST)
        assert plans.overlapped(AT_ONCE, (0, 1), CALL) is choice
    assert {rate: choice and choice.plan for rate, choice in found.items()} == {1e15: AT_ONCE, 1e6: IN_PARTS}
    assert "keys as they arrive, by links as measured" in str(found[1e6])
    assert "keys at once, by links as measured" in str(found[1e15])


@pytest.mark.parametrize(
    ("plan", "call", "machine"),
    [
        (IN_PARTS, CALL, SLOW),
        (Plan(patch=2, strategy=ExactPatch(overlap=False)), CALL, SLOW),
        (Plan(patch=2, strategy=ExactPatch(attention="ring")), CALL, SLOW),
        (Plan(patch=2, strategy=ExactPatch(ulysses=2)), CALL, SLOW),
        (Plan(patch=2, strategy="displaced"), CALL, SLOW),
        (Plan(cfg=2), CALL, SLOW),
        (AT_ONCE, {**CALL, "image": object()}, SLOW),
        (AT_ONCE, CALL, linked(1e6, replace(GPU, beside_host=False))),
        (AT_ONCE, CALL, None),
    ],
    ids=["decided", "at-once", "ring", "ulysses", "stale", "cfg", "no-forecast", "cpu", "not-measured"],
)
def test_where_no_link_is_known_or_nothing_is_open_a_plan_stays_as_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    plan: Plan,
    call: dict[str, Any],
    machine: MeasuredMachine | None,
) -> None:
    """Control: the last test, in which the same plan is changed."""

    def refuse(plan: Plan) -> Forecast:
        raise AssertionError(f"{plan} is not open")

    known = KeptMachines(VerificationCache(tmp_path / "known"))
    if machine is not None:
        known.keep(DEVICES, machine)
    assert timed(monkeypatch, known, refuse).overlapped(plan, (0, 1), call) is None


def test_a_plan_that_cannot_be_recorded_stays_as_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, kept: KeptMachines
) -> None:
    def refuse(plan: Plan) -> Forecast:
        raise PlanError("it needs values")

    kept.keep(DEVICES, SLOW)
    assert timed(monkeypatch, kept, refuse).overlapped(AT_ONCE, (0, 1), CALL) is None


def test_links_are_those_between_the_ranks_of_the_call(monkeypatch: pytest.MonkeyPatch, kept: KeptMachines) -> None:
    orders = []

    def of(plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        orders.append(order)
        return forecast_of(plan, SLOW, 0.0)  # type: ignore[arg-type]

    kept.keep(DEVICES, SLOW)
    monkeypatch.setattr(timed_plans, "Simulator", lambda *given: simulator(given[1], of))
    TimedPlans("model", {}, DEVICES, kept).overlapped(AT_ONCE, (1, 0), CALL)
    assert orders == [(1, 0)] * 2


@pytest.mark.parametrize("kind", ["local", "torchrun"])
def test_one_process_decides_for_all_ranks(monkeypatch: pytest.MonkeyPatch, kept: KeptMachines, kind: str) -> None:
    """Under torchrun each rank has a caller, which may have measured another link: no rank decides."""
    kept.keep(DEVICES, SLOW)

    def simulate(plan: Plan) -> Forecast:
        return forecast_of(plan, SLOW, 0.0 if plan == IN_PARTS else 1.0)  # type: ignore[arg-type]

    options: Any = SimpleNamespace(plan=AT_ONCE)
    state: Any = PipelineState(options)
    state.executor, state.timed = SimpleNamespace(kind=kind), timed(monkeypatch, kept, simulate)
    plan, reason = state.on_links(AT_ONCE, (0, 1), CALL)
    assert plan == (IN_PARTS if kind == "local" else AT_ONCE)
    assert ("as they arrive" in reason) == (kind == "local")


@pytest.mark.breadth
@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize(("machine", "plan"), [(FAST, AT_ONCE), (SLOW, IN_PARTS)], ids=["fast", "slow"])
def test_a_real_call_on_known_links_has_the_image_of_one_process(machine: MeasuredMachine, plan: Plan) -> None:
    """Both ways on two workers; daily in tests/exact, where the plan names them."""
    KeptMachines.in_home().keep(DEVICES, machine)
    call = {"prompt": "a fox", "height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
    with ParallelPipeline.from_pretrained("embedded", devices=1) as pipe:
        expected = pipe(**call, generator=torch.Generator().manual_seed(0)).images
    with ParallelPipeline.from_pretrained("embedded", devices=2, plan=AT_ONCE) as pipe:
        found = pipe(**call, generator=torch.Generator().manual_seed(0)).images
        assert pipe.last_run is not None
        assert pipe.last_run.plan == plan
        assert pipe.plan == AT_ONCE
    assert abs(found - expected).max() < 1e-4


@pytest.mark.breadth
def test_a_real_pipeline_plans_its_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The embedded model on two workers, with a measurement that makes links slow: guidance is split."""
    monkeypatch.setenv("HOME", str(tmp_path))
    links = (LinkClass(pairs=((0, 1),), latency=1.0, rate=1e6),)
    KeptMachines.in_home().keep(DEVICES, replace(MACHINE, links=links))
    with ParallelPipeline.from_pretrained("embedded", devices=2) as pipe:
        pipe.set_progress_bar_config(disable=True)
        found = pipe.planned("a fox", height=64, width=64, num_inference_steps=2)
        pipe("a fox", height=64, width=64, num_inference_steps=2)
        assert pipe.plan == found.plan == Plan()
        assert pipe.last_run is not None
        assert pipe.last_run.forecast == pytest.approx(found.forecast.seconds)
        assert "as measured" in pipe.explain()


@pytest.mark.breadth
def test_a_real_call_runs_on_the_faster_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    KeptMachines.in_home().keep(DEVICES, measured_of(9.0, 1.0, latency=1e3))
    with ParallelPipeline.from_pretrained("embedded", devices=2) as pipe:
        pipe.set_progress_bar_config(disable=True)
        pipe("a fox", height=64, width=64, num_inference_steps=1)
        assert pipe.plan == Plan()
        assert pipe.last_run is not None
        assert [each.rank for each in pipe.last_run.ranks] == [1]
