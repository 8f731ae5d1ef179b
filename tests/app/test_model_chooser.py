"""A page loads another model, and one that cannot be is refused in a sentence while the first stays."""

from __future__ import annotations

import asyncio
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
from app.state import PREPARE, AppState
from app.workers import AppConfig, AppWorkers, devices_of
from patchpar import PlanError
from patchpar.models.files import needed_bytes, resolve_model

from .fakes import FakePipeline
from .test_bad_input import OWNER
from .test_history_panel import last_of
from .waits import over, until

TWO = devices_of("cpu:2")
SHOWS = "_Readiness.show"


class OpenedPipeline(FakePipeline):
    """Remembers the names by which it was opened."""

    names: ClassVar[list[Any]] = []
    broken: ClassVar[str] = ""
    weak: ClassVar[str] = ""
    may_load: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def from_pretrained(cls, model: str, **options: Any) -> Any:
        cls.names.append((model, options.get("variant")))
        if model == cls.broken:
            raise PlanError(f"{model} is broken")
        assert cls.may_load.wait(10)
        found = cls()
        found.error = PlanError(f"{model} has no room for an image") if model == cls.weak else None
        return found

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
    monkeypatch.setattr(OpenedPipeline, "weak", "")
    OpenedPipeline.may_load.set()
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
    status, loaded, *_ = last_of(chooser.load(OWNER, " embedded-dit "))
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
    [
        ("", "'' is no model"),
        ("no/such/model/here", "no such folder is here"),
        ("embedded-face", "this model generates video block by block"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_is_closed(state: AppState, model: str, message: str) -> None:
    status, loaded, *_ = last_of(chooser_of(state).load(OWNER, model))
    assert "alert" in status
    assert message in status.replace("&#x27;", "'")
    assert loaded == ""
    assert OpenedPipeline.names == [("embedded", "fp16")]
    assert state.workers.setup.model == "embedded"


def leave_free(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so much of the host's memory be free, beside what is loaded."""
    for name in ("patchpar.models.files.free_memory", "app.workers.free_memory"):
        monkeypatch.setattr(name, lambda: num_bytes)


def weights_of(model: str) -> int:
    """Bytes of those that two ranks have."""
    _, options, folder = resolve_model(model, {})
    return len(TWO.names) * needed_bytes(folder, options)


def test_one_that_does_not_fit_is_refused_with_what_would(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first one holds is free by then: two models that fit one after the other need not fit together."""
    chooser = chooser_of(state)
    assert last_of(chooser.load(OWNER, "embedded-dit"))[1] == "embedded-dit"
    held, needed = (weights_of(model) for model in ("embedded-dit", "embedded"))
    assert 0 < held < needed
    leave_free(needed - held - 1, monkeypatch)
    status, loaded, *_ = last_of(chooser.load(OWNER, "embedded"))
    assert ("MiB are free" in status, loaded) == (True, "")
    assert OpenedPipeline.names[-1] == ("embedded-dit", None), "and nothing was closed"
    leave_free(needed - held, monkeypatch)
    assert last_of(chooser.load(OWNER, "embedded"))[1] == "embedded"


def test_one_that_fails_leaves_the_first(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenedPipeline, "broken", "embedded-dit")
    chooser = chooser_of(state)
    status, loaded, *_ = last_of(chooser.load(OWNER, "embedded-dit"))
    assert ("embedded-dit is broken" in status, loaded) == (True, "")
    title, *fields = chooser.filled(loaded)
    assert not any("value" in each for each in (title, *fields))
    state.workers.image_pipeline()
    assert OpenedPipeline.names[-1] == ("embedded", "fp16")


@pytest.mark.parametrize("is_weak", [True, False])
def test_the_first_comes_back_also_after_its_first_image_fails(
    state: AppState, monkeypatch: pytest.MonkeyPatch, is_weak: bool
) -> None:
    """The pages would say that it failed, and go on with it."""
    monkeypatch.setattr(OpenedPipeline, "weak", "embedded-dit" if is_weak else "")
    colours = state.image_runner.colours
    status, loaded, *_ = last_of(chooser_of(state).load(OWNER, "embedded-dit"))
    assert ("has no room for an image" in status, loaded == "") == (is_weak, is_weak)
    assert state.workers.setup.model == ("embedded" if is_weak else "embedded-dit")
    assert (state.image_runner.colours is colours) == is_weak


def test_a_page_that_opens_does_not_say_that_the_first_one_failed(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does until there is another one."""

    def displayed() -> Any:
        (show,) = (each.fn for each in build(state).fns.values() if getattr(each.fn, "__qualname__", "") == SHOWS)
        return last_of(show())

    monkeypatch.setattr(OpenedPipeline, "broken", "embedded")
    state.workers.close()
    state.prepare()
    prepared = state.job_queue.job_of("", PREPARE)
    assert prepared is not None
    assert over(prepared).state == "failed"
    assert "embedded is broken" in displayed()["value"]
    last_of(chooser_of(state).load(OWNER, "embedded-dit"))
    assert displayed()["visible"] is False


def test_loading_can_be_cancelled(state: AppState) -> None:
    OpenedPipeline.may_load.clear()
    job = chooser_of(state).submit(OWNER, "embedded-dit")
    until(lambda: ("embedded-dit", None) in OpenedPipeline.names, "loading to begin")
    assert "starting the workers and loading the model" in job.view.note
    state.job_queue.cancel(OWNER)
    assert "cancelling embedded-dit: the model before it comes back" in job.view.note
    OpenedPipeline.may_load.set()
    assert over(job).state == "cancelled"
    assert OpenedPipeline.names[-1] == "closed"
    assert state.workers.setup.model == "embedded"
    assert state.workers.image_pipeline().calls == [], "no image of it was made"  # type: ignore[attr-defined]


def test_it_is_offered_where_a_model_loads_and_after_a_reload(state: AppState) -> None:
    """Every other button of the page says that the page has a job, which can be cancelled."""
    OpenedPipeline.may_load.clear()
    chooser = chooser_of(state)
    assert [each["interactive"] for each in last_of(chooser.resume(OWNER))[2:]] == [True, False]
    job = chooser.submit(OWNER, "embedded-dit")

    async def first() -> tuple[Any, ...]:
        return await anext(aiter(chooser.resume(OWNER)))

    assert [each["interactive"] for each in asyncio.run(first())[2:]] == [False, True]
    assert "model" in state.kinds_of(OWNER)
    state.job_queue.cancel(OWNER)
    OpenedPipeline.may_load.set()
    over(job)
    assert "Cancelled" in last_of(chooser.resume(OWNER))[0]
    config = build(state).get_config_file()
    (button,) = (each["id"] for each in config["components"] if each["props"].get("elem_id") == "model-cancel")
    assert any(button in each["outputs"] for each in config["dependencies"])
    assert any([button, "click"] in [[*target] for target in each["targets"]] for each in config["dependencies"])


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
