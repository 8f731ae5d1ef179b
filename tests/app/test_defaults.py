"""Fields begin with what the loaded model has as its own, and what a person has changed is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from html import unescape
from typing import Any

import gradio as gr
import pytest

from app.defaults import Defaults, defaults_before, defaults_of
from app.fields import Forms, image_fields
from app.image_stream import StreamSummary
from app.image_tab import ImageTab
from app.job_queue import JobView
from app.page import build
from app.plan_tab import PlanTab
from app.presets import CUSTOM, CUSTOM_MEANING
from app.state import AppState
from app.stream_tab import show
from app.workers import AppConfig
from patchpar.models.info import PipelineInfo, describe
from tests import tiny

from .app_states import state_of
from .fakes import FakePipeline, FakeWorkers
from .test_bad_input import AUTOMATIC, OWNER, fields, message_of


class LoadedWorkers(FakeWorkers):
    """A model of the hub, which has been loaded, or not yet."""

    def __init__(self, model: str, description: PipelineInfo | None) -> None:
        super().__init__(FakePipeline())
        self.setup, self.loaded = AppConfig(model=model), description

    @property
    def model(self) -> Any:
        return self.loaded


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    app_states: list[AppState] = []

    def open_state(model: str, description: PipelineInfo | None = None) -> AppState:
        app_states.append(state_of(LoadedWorkers(model, description)))
        monkeypatch.setenv("GRADIO_TEMP_DIR", str(app_states[-1].uploads))
        return app_states[-1]

    yield open_state
    for each in app_states:
        each.close()


@pytest.mark.parametrize(("kind", "steps", "guidance"), [("sd", 50, 7.5), ("sdxl", 50, 5.0), ("flux", 28, 3.5)])
def test_they_are_those_of_the_pipeline_s_call_and_of_its_size(kind: str, steps: int, guidance: float) -> None:
    model = describe(tiny.build(kind).pipe)
    found = defaults_of("org/name", model)
    assert (found.steps, found.guidance) == (steps, guidance)
    assert model.default_size is not None
    assert (found.height, found.width) == tuple(max(64, side) for side in model.default_size)


def test_the_embedded_models_have_theirs_whatever_their_class_says() -> None:
    known = Defaults(height=256, width=256, steps=20, guidance=4.0)
    assert defaults_before("embedded") == defaults_of("embedded-dit", describe(tiny.build("sdxl").pipe)) == known
    assert defaults_of("org/name", None) == Defaults()


def test_a_field_that_a_person_has_changed_keeps_what_it_holds() -> None:
    forms = Forms(Defaults())
    with gr.Blocks():
        image_fields(forms, times=2, max_steps=8)
    names = [each.label for each in forms.components]
    assert names == ["Width", "Height", "Steps", "Guidance scale"]
    values: list[Any] = [each.value for each in forms.components]
    assert values == [2048, 2048, 8, 4.0]
    known = Defaults(height=512, width=768, steps=4, guidance=0.0)
    filled = [each["value"] for each in forms.filled(known, values)]
    assert filled == [1536, 1024, 4, 0.0]
    filled = [each["value"] for each in forms.filled(known, [640, 2048, 8, 9.5])]
    assert filled == [640, 1024, 4, 9.5]
    for each, value in zip(forms.filled(known, values), (1536, 1024), strict=False):
        assert each["minimum"] <= value <= each["maximum"]
        assert (value - each["minimum"]) % each["step"] == 0
    assert forms.filled(Defaults(), values) == [gr.skip()] * 4


def test_the_page_is_filled_when_the_model_has_been_loaded(opened: Any) -> None:
    model = describe(tiny.build("flux").pipe)
    page = build(opened("org/name", model))
    (fill,) = (each for each in page.fns.values() if getattr(each.fn, "__name__", "") == "fill")
    values = [component.value for component in fill.inputs]
    filled = fill.fn(*values)
    assert [each["value"] for each in filled if each["value"] == 3.5]
    assert len(filled) == len(fill.outputs) == 4 * 4 + 2


def test_only_the_embedded_model_is_reported_to_generate_what_it_generates(opened: Any) -> None:
    for model, is_stated in (("embedded", True), ("org/name", False)):
        config = str(build(opened(model)).get_config_file())
        assert ("Prompts of the embedded model" in config) == is_stated


def test_the_list_says_when_a_plan_of_one_s_own_is_what_generates(opened: Any) -> None:
    tab = ImageTab(opened("embedded"))
    line, meaning = tab.write("patch=2", "displaced")
    assert (line["value"], CUSTOM_MEANING in meaning) == (CUSTOM, True)
    line, meaning = tab.write(" ", "")
    assert (line["value"], "never approximate" in meaning) == (AUTOMATIC, True)
    assert tab.choose(AUTOMATIC)[1:] == ("", "")  # what was written no longer counts, and is no longer there
    assert CUSTOM_MEANING in tab.choose(CUSTOM)[0]
    assert "the custom plan is empty: fill it in" in message_of(tab.generate(OWNER, CUSTOM, "", " ", True, *fields()))


def test_what_is_chosen_is_what_generates(opened: Any) -> None:
    state = opened("embedded")
    asyncio.run(_to_the_end(ImageTab(state).generate(OWNER, CUSTOM, "patch=2", "displaced", True, *fields())))
    assert str(state.workers.image_pipeline().plan) == "patch=2,strategy=displaced"


async def _to_the_end(displayed: Any) -> None:
    async for _ in displayed:
        pass


def test_a_stream_that_is_stopped_before_its_first_image_has_made_nothing() -> None:
    none, one = (StreamSummary(images=count, seconds=1.0, latency=0.0, devices="2") for count in (0, 1))
    status, facts, save, *_ = show(JobView(state="done", result=none))
    assert "Stopped before the first image" in status
    assert "Done" not in status
    assert facts == ""
    assert save["visible"] is False
    status, facts, *_ = show(JobView(state="done", result=one))
    assert "Done" in status
    assert "1 in 1.0 s" in facts


def test_a_size_that_no_plan_can_generate_is_not_offered(opened: Any) -> None:
    tab = PlanTab(opened("org/name", describe(tiny.build("sdxl").pipe)))
    message, generated, table = tab.show(2, 250, 256, True, 1)
    assert "width=250 is no multiple of 8, the model's grid: use 248 or 256" in unescape(message)
    assert (generated, table) == ("", "")
    assert "can be run" in tab.show(2, 256, 256, True, 1)[2]
