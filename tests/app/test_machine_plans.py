"""The tab Plan says what plans take on a machine: the planner's own forecast, and where its numbers are from."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app import machine_plans
from app.forecast import CallToPlan
from app.forecast_panel import ForecastPanel
from app.job_queue import Job, JobView
from app.machine_plans import HEAD, HERE, MACHINES, plans_on
from app.plan_tab import MachinePanel, show_machine
from app.workers import AppConfig, devices_of
from patchpar import ParallelPipeline, Plan, PlanError
from patchpar.models.info import describe
from patchpar.pipeline.planner.simulate import simulate
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.measured_machine import LinkClass, MeasuredMachine
from patchpar.shard.verification_cache import VerificationCache
from tests.planner.test_search import forecast_of
from tests.tiny import build
from tests.unit.test_measured_machine import DEVICE

from .test_bad_input import OWNER, message_of

TWO = devices_of("cpu:2")
CARDS = "2xRTX4090-pcie4"
CALL = CallToPlan(devices=1, height=128, width=128, guided=True)
JOB: Any = SimpleNamespace(check=lambda: None, show=lambda **_: None)
HERE_AS_MEASURED = MeasuredMachine(
    device=replace(DEVICE, memory=2**40), devices=2, links=(LinkClass(pairs=((0, 1),), latency=1e-5, rate=1e9),)
)


@pytest.fixture
def kept(tmp_path: Path) -> KeptMachines:
    return KeptMachines(VerificationCache(tmp_path / "machines"))


@pytest.fixture(scope="module")
def workers() -> Any:
    model = describe(build("sdxl").pipe)
    return SimpleNamespace(setup=AppConfig(model="embedded", devices=TWO), count=2, loaded_model=lambda: model)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Forecasts without recording: a second for a step alone, and a quarter of it for each exchange with a band."""
    found: list[Any] = []

    def simulator(folder: str, machine: Any, options: Any, call: Any) -> Any:
        found.append((folder, machine, call))

        def of(plan: Plan, order: tuple[int, ...] = ()) -> Any:
            if plan.patch > 1:
                raise PlanError("it cannot be recorded")
            return forecast_of(plan, machine, 0.25)

        return SimpleNamespace(of=of)

    monkeypatch.setattr(machine_plans, "Simulator", simulator)
    return found


def test_the_best_plan_of_a_machine_by_name_is_first(workers: Any, kept: KeptMachines, asked: list[Any]) -> None:
    found = plans_on(workers, JOB, CARDS, CALL, 10, kept)
    first, second, *refused = [dict(zip(HEAD, row, strict=True)) for row in found.rows]
    assert (first["plan"], first["step"], first["image"]) == ("cfg=2", "500 ms", "5 s")
    assert (second["plan"], second["step"], second["sent per step, by a rank"]) == ("single", "1 s", "nothing")
    assert first["result"] == "fits"
    assert "GiB" in first["memory of a device"]
    assert {row["result"] for row in refused} == {"it cannot be recorded"}
    assert "published rates" in found.note
    assert asked == [("embedded", Machine.parse(CARDS), {"height": 128, "width": 128, "guidance_scale": 4.0})]


def test_this_machine_is_the_one_that_was_measured(workers: Any, kept: KeptMachines, asked: list[Any]) -> None:
    with pytest.raises(PlanError, match="run patchpar tune --devices cpu:2, or name a machine"):
        plans_on(workers, JOB, HERE, CALL, 10, kept)
    kept.keep(TWO.names, HERE_AS_MEASURED)
    assert "measured of these devices" in plans_on(workers, JOB, HERE, CALL, 10, kept).note


def test_a_step_that_does_not_fit_is_said(workers: Any, kept: KeptMachines, asked: list[Any]) -> None:
    kept.keep(TWO.names, replace(HERE_AS_MEASURED, device=replace(DEVICE, memory=2**20)))
    assert {row[-1] for row in plans_on(workers, JOB, HERE, CALL, 10, kept).rows} >= {"does not fit"}


@pytest.mark.parametrize(
    ("machine", "message"),
    [("2xNoSuchCard", "NoSuchCard"), ("", "cannot be read"), ("512xH100-nvlink", "at most 64 are looked at")],
)
def test_what_is_no_machine_is_refused(workers: Any, asked: list[Any], machine: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plans_on(workers, JOB, machine, CALL, 10)


def test_machines_of_the_list_can_be_read() -> None:
    assert all(Machine.parse(name).devices > 1 for name in MACHINES if name != HERE)


def test_the_panel(state: Any, workers: Any, kept: KeptMachines, asked: list[Any]) -> None:
    panel = MachinePanel(state)
    assert "steps 0" in message_of(panel.forecast(OWNER, CARDS, 0, 128, 128, True))
    assert "width None" in message_of(panel.forecast(OWNER, CARDS, 3, None, 128, True))
    displayed = show_machine(JobView(state="done", result=plans_on(workers, JOB, CARDS, CALL, 10, kept)))
    assert 'class="marked"' in displayed
    assert "Predicted for 10 steps" in displayed


@pytest.mark.breadth
def test_it_is_what_simulate_says(kept: KeptMachines) -> None:
    """Of the embedded model, whose plans are recorded."""
    with ParallelPipeline.from_pretrained("embedded", devices="cpu") as pipe:
        model = pipe.description
    workers: Any = SimpleNamespace(setup=AppConfig(model="embedded", devices=TWO), loaded_model=lambda: model)
    found = plans_on(workers, JOB, CARDS, CALL, 10, kept).found
    assert found.ranked
    for each in found.ranked:
        wanted = simulate("embedded", CARDS, each.plan, height=128, width=128, guidance_scale=4.0)
        assert each.step.seconds == pytest.approx(wanted.step.seconds)


def test_forecasts_can_be_cancelled(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What refuses another job of the page says so."""
    seen, go = list[Any](), threading.Event()

    def slow(*arguments: Any) -> None:
        job = next(each for each in arguments if isinstance(each, Job))
        assert go.wait(20)
        job.check()

    monkeypatch.setattr("app.plan_tab.plans_on", slow)
    monkeypatch.setattr("app.forecast_panel.forecast_presets", slow)

    async def cancelled(outputs: Any) -> Any:
        async for _, start, cancel in outputs:
            seen.append((start["interactive"], cancel["interactive"]))
            state.job_queue.cancel(OWNER)
            go.set()

    for kind, outputs in (
        ("machine", MachinePanel(state).forecast(OWNER, CARDS, 3, 128, 128, True)),
        ("forecast", ForecastPanel(state).forecast(OWNER, "a fox", "", 128, 128, 3, 4.0, 0)),
    ):
        asyncio.run(asyncio.wait_for(cancelled(outputs), 30))
        assert (seen[0], seen[-1]) == ((False, True), (True, False))
        assert state.job_queue.job_of(OWNER, kind).view.state == "cancelled"
        seen.clear()
        go.clear()
