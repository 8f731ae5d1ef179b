"""Whatever cannot work is a sentence on the page, with the value, the limit and the way out, and generates nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.compare_tab import CompareTab
from app.high_res_tab import LargeTab
from app.image_tab import ImageTab
from app.page import build as build_page
from app.plan_tab import PlanTab
from app.state import AppState
from app.stream_tab import StreamTab
from app.workers import AppConfig, devices_of
from patchpar import ParallelPipeline, PlanError, UnsupportedModel, WorkerDied
from patchpar.models.info import describe
from patchpar.pipeline.validate import bind, check_call, check_plan_for
from patchpar.plan.plan import Plan
from tests.tiny import build

from .app_states import state_of
from .fakes import FakePipeline, FakeWorkers

OWNER = "a" * 32
NAMES = ("prompt", "negative", "width", "height", "steps", "guidance", "seed")
FIELDS: dict[str, Any] = {
    "prompt": "a fox", "negative": "", "width": 128, "height": 128, "steps": 4, "guidance": 4.0, "seed": 0
}  # fmt: skip
AUTOMATIC = "Automatic, 2 devices"


class CheckedPipeline(FakePipeline):
    """Draws nothing that the real one would refuse: it asks the same questions before."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def description(self) -> Any:
        return self.model

    def __call__(self, **arguments: Any) -> Any:
        check_call(self.model, bind(self.model, (), arguments))
        if isinstance(self.plan, Plan):
            check_plan_for(self.model, self.plan, arguments)
        return super().__call__(**arguments)


@pytest.fixture(scope="module")
def model() -> Any:
    return describe(build("sdxl").pipe)


@pytest.fixture
def state(model: Any) -> Iterator[AppState]:
    with closing(state_of(FakeWorkers(CheckedPipeline(model)))) as found:
        yield found


def message_of(displayed: Any) -> str:
    """The sentence that a person is left with; it is announced as an alert, and is nothing but a sentence."""

    async def last() -> tuple[Any, ...]:
        found: tuple[Any, ...] = ()
        async for each in displayed:
            found = each
        return found

    (alert,) = (text for text in asyncio.run(asyncio.wait_for(last(), 30)) if isinstance(text, str) and "alert" in text)
    message = unescape(re.sub("<[^>]*>", "", alert))
    assert "Traceback" not in message
    assert "Error:" not in message
    return message


def fields(**changes: Any) -> list[Any]:
    return [{**FIELDS, **changes}[name] for name in NAMES]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"height": 100}, ["height=100", "multiple of 8", "96 or 104"]),
        ({"width": 100, "label": "2 bands, exact"}, ["width=100", "multiple of 8", "96 or 104"]),
        ({"width": 32}, ["width 32", "from 64"]),
        ({"height": None}, ["height is empty", "fill it in"]),
        ({"steps": 0}, ["steps 0", "from 1 to 150"]),
        ({"steps": 1.5}, ["steps 1.5", "whole number"]),
        ({"prompt": ""}, ["no prompt", "describe the image"]),
        ({"prompt": "x" * 1001}, ["1001 characters", "at most 1000"]),
        ({"seed": -1}, ["seed -1", "from 0"]),
        ({"degrees": "rows=2"}, ["unknown axis 'rows'", "data, cfg, stage, patch, tensor"]),
        ({"degrees": "cfg=2,patch=2"}, ["takes 4 devices", "there are 2"]),
        ({"degrees": "patch=two"}, ["patch=two", "whole number"]),
        ({"degrees": "patch=2", "strategy": "psychic"}, ["'psychic'", "exact"]),
        ({"degrees": "patch=2", "strategy": "exact:speed=9"}, ["speed=9", "its options are"]),
        ({"degrees": "auto", "strategy": "pcpp"}, ["needs a plan to go with"]),
        ({"degrees": "cfg=2", "guidance": 1.0}, ["uses none", "guidance_scale > 1", "cfg=1"]),
        ({"degrees": "data=2"}, ["data=2", "1 prompt", "list of at least 2"]),
        ({"label": "By magic"}, ["no preset 'By magic'", "choose one of the list"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_image(state: AppState, changes: dict[str, Any], parts: list[str]) -> None:
    preset = [changes.pop(name, default) for name, default in (("label", AUTOMATIC), ("degrees", ""), ("strategy", ""))]
    changes = dict(changes)
    message = message_of(ImageTab(state).generate(OWNER, *preset, True, 1, *fields(**changes)))
    assert all(word in message for word in parts), message
    assert state.workers.image_pipeline().calls == []  # type: ignore[attr-defined]


def test_more_ranks_than_bands(model: Any) -> None:
    with closing(state_of(FakeWorkers(CheckedPipeline(model), count=8))) as state:
        message = message_of(
            ImageTab(state).generate(OWNER, "8 bands, exact", "", "", True, 1, *fields(width=64, height=64))
        )
        assert all(word in message for word in ("8 latent rows make 2 bands", "8 ranks", "at most 2", "256 pixels"))


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (UnsupportedModel("net cannot be split over axis 'patch': use cfg=2 or data=N"), ["use cfg=2 or data=N"]),
        (
            WorkerDied("rank 1 (cpu) died, exit code -9\nTraceback (most recent call last):\n  File x"),
            ["exit code -9", "try once more"],
        ),
        (PlanError("2 CPU ranks need about 9 GiB, but only 1 GiB are free: use a smaller dtype"), ["smaller dtype"]),
    ],
)
def test_what_shows_only_while_it_runs(state: AppState, error: Exception, parts: list[str]) -> None:
    state.workers.image_pipeline().error = error  # type: ignore[attr-defined]
    message = message_of(ImageTab(state).generate(OWNER, AUTOMATIC, "", "", True, 1, *fields()))
    assert all(word in message for word in parts), message


def test_the_other_tabs(state: AppState, tmp_path: Path) -> None:
    image, broken = tmp_path / "a.png", tmp_path / "b.png"
    Image.new("RGB", (64, 64)).save(image)
    broken.write_bytes(image.read_bytes()[:60])
    compare, high_res, stream = CompareTab(state), LargeTab(state), StreamTab(state)
    video = (None, None, 8, 0.6)
    for displayed, word in (
        (compare.run(OWNER, AUTOMATIC, "By magic", *fields()), "no preset 'By magic'"),
        (compare.run(OWNER, AUTOMATIC, AUTOMATIC, *fields(steps=0)), "steps 0"),
        (high_res.generate(OWNER, "overlp=1", False, *fields()), "overlp=1"),
        (high_res.upscale(OWNER, None, 2, 0.35, "a fox", 30, 0), "there is no image: choose one"),
        (high_res.upscale(OWNER, str(broken), 2, 0.35, "a fox", 30, 0), "the file cannot be read as"),
        (high_res.upscale(OWNER, str(image), 99, 0.35, "a fox", 30, 0), "scale 99: it is more than 1 and at most 8"),
        (high_res.upscale(OWNER, str(image), None, 0.35, "a fox", 30, 0), "scale 0"),
        (high_res.upscale(OWNER, str(image), 2, 0.1, "a fox", 5, 0), "leaves none: use more of either"),
        (
            stream.generate(OWNER, "An image", str(image), None, 8, 0.1, *fields(steps=9)),
            "9 steps, of which strength 0.1 leaves none: use more of either",
        ),
        (stream.generate(OWNER, "An image", *video, *fields()), "there is no image: choose one"),
        (stream.generate(OWNER, "A video", *video, *fields()), "there is no video: choose one"),
        (
            stream.generate(OWNER, "A video", None, str(image), 8, 0.6, *fields()),
            "the file cannot be read as a video: use .mp4",
        ),
        (stream.talk(OWNER, None, None, "", 500, False), "500 seconds: the limit is more than 0 and at most 120"),
    ):
        assert word in message_of(displayed)
    assert "no stream is running" in stream.set_prompt(OWNER, "a pine")
    assert "devices 0: it is a whole number from 1" in unescape(PlanTab(state).show(0, 256, 256, True, 1)[0])
    assert "fill in latency and rate" in PlanTab(state).estimate_link(OWNER, None, 1)
    assert "use a latency >= 0" in unescape(PlanTab(state).estimate_link(OWNER, -1, 1))


def test_a_page_that_the_server_does_not_know(state: AppState) -> None:
    """Gradio forgets which page it is when the server is started again under it, or it was away for an hour.

    All of these would share their jobs and their history.
    """
    for displayed in (
        ImageTab(state).generate("", AUTOMATIC, "", "", True, 1, *fields()),
        CompareTab(state).run("", AUTOMATIC, AUTOMATIC, *fields()),
        StreamTab(state).generate("", "The prompt alone", None, None, 8, 0.6, *fields()),
    ):
        assert "the server does not know this page" in message_of(displayed)
    assert state.workers.image_pipeline().calls == []  # type: ignore[attr-defined]
    assert state.history.names("") == []


def test_no_field_cuts_a_text(state: AppState) -> None:
    """A browser cuts what is pasted into a field with a limit, without a word; the limit is in the message instead."""
    texts = [each["props"] for each in build_page(state).get_config_file()["components"] if each["type"] == "textbox"]
    assert "Prompt" in [each.get("label") for each in texts]
    assert [each.get("label") for each in texts if each.get("max_length") is not None] == []


def test_no_number_field_has_a_limit_of_its_own(state: AppState) -> None:
    """Gradio would refuse the number before the handler, without the field's name and with a traceback in the log."""
    numbers = [each["props"] for each in build_page(state).get_config_file()["components"] if each["type"] == "number"]
    assert "Seed" in [each.get("label") for each in numbers]
    limited = [each for each in numbers if each.get("minimum") is not None or each.get("maximum") is not None]
    assert [each.get("label") for each in limited] == []


def test_models_and_memory_are_looked_at_before_the_page_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = devices_of("cpu:2")
    with pytest.raises(PlanError, match="'nowhere' is no model"):
        AppConfig(model="nowhere", devices=devices).check()
    with pytest.raises(PlanError, match=r"has no model_index\.json"):
        AppConfig(model=str(tmp_path), devices=devices).check()
    monkeypatch.setattr("patchpar.models.files.free_memory", lambda: 10 * 2**20)
    with pytest.raises(PlanError, match=r"2 CPU ranks need about .* MiB are free: use a smaller dtype"):
        AppConfig(devices=devices).check()


def test_a_folder_of_a_face_that_is_none_is_a_sentence(state: AppState, tmp_path: Path) -> None:
    def no_face() -> Any:
        raise PlanError(f"{tmp_path} has no model_index.json, so it is no diffusers model folder")

    state.workers.face_stream = no_face  # type: ignore[method-assign]
    assert "no diffusers model folder" in message_of(StreamTab(state).talk(OWNER, None, None, "", 1, False))


def test_the_questions_are_those_of_the_real_pipeline() -> None:
    """What CheckedPipeline asks, the real one asks: both refuse the same call."""
    pipe = ParallelPipeline(build("sdxl").pipe, devices="cpu")
    with pytest.raises(PlanError, match="height=100 is no multiple of 8"):
        pipe(prompt="a fox", height=100)
    pipe.close()
