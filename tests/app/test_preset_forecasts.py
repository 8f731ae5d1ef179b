"""Beside each preset: the planner's own forecast, and plainly what is not known."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app import preset_forecasts
from app.forecast_panel import ForecastPanel
from app.page import build as build_page
from app.preset_forecasts import HEAD, forecast_presets
from app.presets import presets_for
from app.requests import GenerateRequest
from app.workers import AppConfig, devices_of
from patchpar import ParallelPipeline, Plan, PlanError
from patchpar.models.info import describe
from patchpar.pipeline.planner.simulate import simulate
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.replay.measured_machine import LinkClass, MeasuredMachine
from patchpar.shard.verification_cache import VerificationCache
from tests.planner.test_search import forecast_of
from tests.tiny import build
from tests.unit.test_measured_machine import DEVICE

LINKS = (LinkClass(pairs=((0, 1),), latency=1e-5, rate=1e9),)
MACHINE = MeasuredMachine(device=replace(DEVICE, memory=2**40), devices=2, links=LINKS)
TWO = devices_of("cpu:2")
OWNER = "a-page"
REQUEST = GenerateRequest(prompt="a fox", steps=10, height=128, width=128)
JOB: Any = SimpleNamespace(check=lambda: None, show=lambda **_: None)


@pytest.fixture
def kept(tmp_path: Path) -> KeptMachines:
    return KeptMachines(VerificationCache(tmp_path / "machines"))


@pytest.fixture(scope="module")
def workers() -> Any:
    model = describe(build("sdxl").pipe)
    return SimpleNamespace(
        setup=AppConfig(model="embedded", devices=TWO), count=2, presets=presets_for(2), loaded_model=lambda: model
    )


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Forecasts without recording: 2 s a step alone, 1 s on two ranks."""
    asked: list[Any] = []

    def of(plan: Plan, order: tuple[int, ...] = ()) -> Any:
        asked.append(plan)
        if plan.strategy.name == "fresh-edges" and "bits" in str(plan):
            raise PlanError("it cannot be recorded")
        return forecast_of(plan, MACHINE, 0.25)  # type: ignore[arg-type]

    monkeypatch.setattr(preset_forecasts, "Simulator", lambda *args: asked.append(args[1:]) or SimpleNamespace(of=of))
    return asked


def rows_of(found: Any) -> dict[str, tuple[str, ...]]:
    return {row[0].partition(":")[0]: row for row in found.rows}


def test_seconds_of_a_machine_that_was_not_measured_are_unknown(
    workers: Any, kept: KeptMachines, planned: list[Any]
) -> None:
    found = forecast_presets(workers, JOB, REQUEST, kept)
    rows = rows_of(found)
    assert list(rows) == ["Exact", "One device", "Fast links", "Slow links", "Fewest bytes"]
    assert {row[HEAD.index("seconds")] for row in rows.values() if row[2]} == {"unknown"}
    assert "Seconds are unknown" in found.note
    assert "patchpar tune --devices cpu:2" in found.note
    assert planned[0][0] == "2xH100-nvlink"
    assert planned[0][2] == {"height": 128, "width": 128, "guidance_scale": 4.0}


def test_those_of_a_measured_one_are_the_planner_s(workers: Any, kept: KeptMachines, planned: list[Any]) -> None:
    kept.keep(TWO.names, MACHINE)
    found = forecast_presets(workers, JOB, REQUEST, kept)
    rows = rows_of(found)
    assert "not measured with this model" in found.note
    for name in ("One device", "Fast links", "Slow links"):
        plan = Plan.parse(rows[name][2])
        wanted = replace(forecast_of(plan, MACHINE, 0.25), steps=10)  # type: ignore[arg-type]
        assert rows[name][3] == f"{wanted.seconds:.1f} s"
    assert [rows[name][1] for name in ("Exact", "Fast links", "Slow links")] == ["exact", "exact", "approximate"]
    assert rows["Exact"][2].startswith("cfg=2"), "the plan of the shortest step"
    assert rows["Fewest bytes"][1:3] == ("it cannot be recorded", "")


def test_what_a_preset_cannot_run_is_said(workers: Any, kept: KeptMachines, planned: list[Any]) -> None:
    four = SimpleNamespace(**vars(workers) | {"count": 4, "presets": presets_for(4)})
    found = rows_of(forecast_presets(four, JOB, replace(REQUEST, height=64, width=64), kept))
    assert found["One device"][1] == "exact"
    assert "but axis 'patch' has 4 ranks: use at most 2, or a height of at least 128 pixels" in found["Fast links"][1]
    assert set(found["Fast links"][2:]) == {""}
    with pytest.raises(PlanError, match="no multiple of"):
        forecast_presets(workers, JOB, replace(REQUEST, width=100), kept)


def resumed(panel: ForecastPanel) -> list[Any]:
    """What a page that is reloaded gets, up to the end of its job."""

    async def updates() -> list[Any]:
        return [each async for each in panel.resume(OWNER)]

    return asyncio.run(asyncio.wait_for(updates(), 30))


def test_a_forecast_comes_back_after_a_reload(
    state: Any, workers: Any, kept: KeptMachines, planned: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running or done. The buttons are the tab's: those of another job of the page stay as they are."""
    began, go, panel = threading.Event(), threading.Event(), ForecastPanel(state)

    def slow(_: Any, job: Any, request: GenerateRequest) -> Any:
        began.set()
        assert go.wait(20)
        return forecast_presets(workers, job, request, kept)

    monkeypatch.setattr("app.forecast_panel.forecast_presets", slow)
    assert panel.ask(OWNER) == ""
    assert resumed(panel) == [("", gr.skip(), gr.skip())]
    panel.submit(OWNER, REQUEST)
    assert began.wait(20)
    assert panel.ask(OWNER) == "yes"
    monkeypatch.setattr("app.job_updates.BEGIN_SECONDS", 0.05)
    threading.Timer(0.2, go.set).start()
    first, *_, (table, start, cancel) = resumed(panel)
    assert (first[1]["interactive"], first[2]["interactive"]) == (False, True)
    assert "One device" in table
    assert (start["interactive"], cancel["interactive"]) == (True, False)
    assert resumed(panel) == [(table, gr.skip(), gr.skip())]


def test_the_page_asks_for_a_forecast_once_it_knows_its_name(state: Any) -> None:
    page = build_page(state).get_config_file()
    (table,) = (each["id"] for each in page["components"] if each["props"].get("elem_id") == "forecast-status")
    owners = [each["id"] for each in page["components"] if each["type"] == "state"]
    asking = [each for each in page["dependencies"] if each["targets"] == [(owners[0], "change")]]
    answered = [(output, "change") for each in asking for output in each["outputs"]]
    resuming = [each for each in page["dependencies"] if set(each["targets"]) & set(answered)]
    assert [each["outputs"][0] for each in resuming] == [table]


@pytest.mark.breadth
def test_bytes_and_memory_are_those_of_simulate(kept: KeptMachines) -> None:
    """Of the embedded model, without a measurement."""
    with ParallelPipeline.from_pretrained("embedded", devices="cpu") as pipe:
        model = pipe.description
    workers: Any = SimpleNamespace(
        setup=AppConfig(model="embedded", devices=TWO), count=2, presets=presets_for(2), loaded_model=lambda: model
    )
    rows = rows_of(forecast_presets(workers, JOB, REQUEST, kept))
    sent = {name: row[4] for name, row in rows.items()}
    wanted = simulate("embedded", "2xH100-nvlink", "patch=2", height=128, width=128, guidance_scale=4.0)
    assert sent["Fast links"] == readable_bytes(max(sum(each.values()) for each in wanted.bytes_sent))
    assert sent["One device"] == "nothing"
    assert all(row[5] for row in rows.values())
