"""A page loads another model, and one that cannot be is refused in a sentence while the first stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import gradio as gr
import pytest

from app.defaults import defaults_before
from app.fields import Forms, image_fields
from app.job_queue import JobQueue
from app.model_chooser import ModelChooser, heading
from app.page import build
from app.state import AppState
from app.workers import AppConfig, AppWorkers, devices_of
from patchpar import PlanError

from .fakes import FakePipeline
from .test_bad_input import OWNER
from .test_history_panel import last_of

TWO = devices_of("cpu:2")


class OpenedPipeline(FakePipeline):
    """Remembers the names by which it was opened."""

    names: ClassVar[list[Any]] = []
    broken: ClassVar[str] = ""

    @classmethod
    def from_pretrained(cls, model: str, **options: Any) -> Any:
        cls.names.append((model, options.get("variant")))
        if model == cls.broken:
            raise PlanError(f"{model} is broken")
        return cls()

    def set_progress_bar_config(self, **_: Any) -> None: ...

    def close(self) -> None:
        self.names.append("closed")

    @property
    def description(self) -> Any:
        return SimpleNamespace(**vars(super().description), size=lambda _: (512, 768))


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[AppState]:
    monkeypatch.setattr(OpenedPipeline, "names", [])
    monkeypatch.setattr(OpenedPipeline, "broken", "")
    monkeypatch.setattr("app.workers.ParallelPipeline", OpenedPipeline)
    setup = AppConfig(model="embedded", devices=TWO, options={"variant": "fp16"}, chooses_models=True)
    with closing(AppState.sharing(AppWorkers(setup), JobQueue())) as found:
        found.workers.image_pipeline()
        yield found


def chooser_of(state: AppState) -> ModelChooser:
    forms = Forms(defaults_before(state.workers.setup.model))
    with gr.Blocks():
        image_fields(forms)
    return ModelChooser(state, forms)


def test_another_model_takes_the_place_of_the_first(state: AppState) -> None:
    chooser, colours = chooser_of(state), state.image_runner.colours
    status, loaded = last_of(chooser.load(OWNER, " embedded-dit "))
    assert ("embedded-dit is loaded" in status, loaded) == (True, "embedded-dit")
    assert OpenedPipeline.names == [("embedded", "fp16"), "closed", ("embedded-dit", None)]
    title, *fields = chooser.filled(loaded)
    assert "the model embedded-dit, on" in title
    assert title == chooser.title() == heading(state)
    assert all("value" in each for each in fields)
    assert state.image_runner.colours is not colours
    page = str(build(state).get_config_file())
    assert "the model embedded-dit" in page
    assert "model-load" in page, "the control of the last test"


@pytest.mark.parametrize(
    ("model", "message"),
    [("", "'' is no model"), ("no/such/model/here", "no such folder is here"), ("embedded-face", "this model is")],
)
def test_what_is_no_model_is_refused_before_anything_is_closed(state: AppState, model: str, message: str) -> None:
    status, loaded = last_of(chooser_of(state).load(OWNER, model))
    assert "alert" in status
    assert message in status.replace("&#x27;", "'")
    assert loaded == ""
    assert OpenedPipeline.names == [("embedded", "fp16")]
    assert state.workers.setup.model == "embedded"


def test_one_that_does_not_fit_is_refused_with_what_would(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchpar.models.files.free_memory", lambda: 2**20)
    status, _ = last_of(chooser_of(state).load(OWNER, "embedded-dit"))
    assert "GiB" in status
    assert OpenedPipeline.names == [("embedded", "fp16")]


def test_one_that_fails_leaves_the_first(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenedPipeline, "broken", "embedded-dit")
    chooser = chooser_of(state)
    status, loaded = last_of(chooser.load(OWNER, "embedded-dit"))
    assert ("embedded-dit is broken" in status, loaded) == (True, "")
    title, *fields = chooser.filled(loaded)
    assert not any("value" in each for each in (title, *fields))
    state.workers.image_pipeline()
    assert OpenedPipeline.names[-1] == ("embedded", "fp16")


def test_a_page_that_others_reach_or_of_a_server_has_no_list(state: AppState) -> None:
    for workers in (
        AppWorkers(replace(state.workers.setup, chooses_models=False)),
        AppWorkers(state.workers.setup, lambda: OpenedPipeline()),  # type: ignore[arg-type, return-value]
    ):
        assert not workers.may_change
        with pytest.raises(PlanError, match="the model that its server was started with"):
            workers.setup_for("embedded-dit")
    with closing(AppState.sharing(workers, JobQueue())) as other:  # of the second: what is on a page is by may_change
        assert "model-load" not in str(build(other).get_config_file())


def test_what_is_known_of_the_first_model_stays_after_a_failure(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tab Plan would wait for a model that nobody loads."""
    monkeypatch.setattr(OpenedPipeline, "broken", "embedded-dit")
    known = state.workers.model
    last_of(chooser_of(state).load(OWNER, "embedded-dit"))
    assert state.workers.model is known is not None


def test_files_are_read_beside_the_event_loop(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    """In it they would hold up every other page."""
    used = list[threading.Thread]()
    check = AppConfig.check

    def noted(*values: Any) -> None:
        used.append(threading.current_thread())
        check(*values)

    monkeypatch.setattr(AppConfig, "check", noted)
    last_of(chooser_of(state).load(OWNER, "embedded-dit"))
    assert used[0] is not threading.current_thread()
