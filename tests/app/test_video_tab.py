"""A video from a prompt: checked before a model is loaded, cancelled like an image, kept as a file that plays."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest

from app.image_runner import ImageJobRunner
from app.job_queue import JobQueue
from app.presets import preset_or_plan
from app.state import AppState
from app.video_generation import VideoJobRequest, generate_video
from app.video_tab import NAMES, VideoTab
from app.workers import AppConfig, AppWorkers, devices_of
from patchpar import PlanError
from tests.tiny import build

from .app_states import state_of
from .fakes import FakePipeline, FakeWorkers
from .test_bad_input import AUTOMATIC, OWNER, message_of
from .test_history_panel import last_of
from .test_model_chooser import leave_free
from .waits import over, until

FIELDS: dict[str, Any] = {
    "model": "org/videos", "prompt": "a boat", "negative": "", "width": 96, "height": 64, "frames": 6, "fps": 8,
    "steps": 3, "guidance": 0, "seed": 5,
}  # fmt: skip
VIDEO, STATUS, FACTS = range(3)


class FakeVideoPipeline(FakePipeline):
    def __call__(self, **arguments: Any) -> Any:
        super().__call__(**arguments)
        shape = (arguments["num_frames"], arguments["height"], arguments["width"], 3)
        return SimpleNamespace(frames=[np.full(shape, 0.5)])


class FakeVideoWorkers(FakeWorkers):
    """With a model of videos beside that of images."""

    def __init__(self) -> None:
        super().__init__(FakePipeline())
        self.videos = FakeVideoPipeline(more=("num_frames", "num_inference_steps"))
        self.may_change = True

    def video_setup(self, model: str) -> None:
        if model == "org/none":
            raise PlanError("org/none is no model")

    def video_pipeline(self, model: str, preset: Any) -> Any:
        self.videos.plan = preset.plan(self.count)
        return self.videos


@pytest.fixture
def workers() -> FakeVideoWorkers:
    return FakeVideoWorkers()


@pytest.fixture
def state(workers: FakeVideoWorkers) -> Iterator[AppState]:
    with closing(state_of(workers)) as found:
        yield found


def fields(**changes: Any) -> list[Any]:
    return [{**FIELDS, **changes}[name] for name in NAMES]


def frames_in(path: str | Path) -> tuple[int, float, tuple[int, int]]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return len([*container.decode(stream)]), float(stream.average_rate or 0), (stream.width, stream.height)


def test_a_video_is_a_file_and_comes_back_after_a_reload(state: AppState, workers: FakeVideoWorkers) -> None:
    outputs = last_of(VideoTab(state).generate(OWNER, "cfg=2", *fields()))
    assert frames_in(outputs[VIDEO]) == (6, 8.0, (96, 64))
    assert "6 frames" in outputs[STATUS]
    assert str(workers.videos.plans[-1]) == "cfg=2"
    (call,) = workers.videos.calls
    assert call["generator"].initial_seed() == 5
    assert {name: call[name] for name in ("prompt", "num_inference_steps", "num_frames", "height", "width")} == {
        "prompt": "a boat",
        "num_inference_steps": 3,
        "num_frames": 6,
        "height": 64,
        "width": 96,
    }
    assert "guidance_scale" not in call, "0 is the pipeline's own value"
    assert last_of(VideoTab(state).resume(OWNER))[VIDEO] == outputs[VIDEO]


def test_it_is_cancelled_between_two_steps(state: AppState, workers: FakeVideoWorkers) -> None:
    workers.videos.go.clear()
    request = VideoJobRequest.of(**FIELDS)
    job = VideoTab(state).submit(OWNER, request, preset_or_plan(AUTOMATIC, 2))
    until(lambda: workers.videos.calls, "the call")
    state.job_queue.cancel(OWNER)
    workers.videos.go.set()
    assert over(job).state == "cancelled"
    assert not list(state.folder_of(OWNER).iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": " "}, "there is no video model"),
        ({"model": "org/none"}, "org/none is no model"),
        ({"prompt": ""}, "there is no prompt: describe the video"),
        ({"prompt": "x" * 1001}, "1001 characters: at most 1000"),
        ({"frames": 2000}, "frames 2000: it is a whole number from 1 to 1024"),
        ({"steps": 1.5}, "steps 1.5: it is a whole number"),
        ({"fps": None}, "fps None"),
        ({"width": 8192, "height": 8192}, "at most 16777216 in all"),
        ({"guidance": -1}, "guidance scale -1"),
        ({"width": 97}, "even sides"),
        ({"guidance": 5, "negative": "fog"}, ""),
    ],
)
def test_what_cannot_be_is_a_sentence(
    state: AppState, workers: FakeVideoWorkers, changes: dict[str, Any], message: str
) -> None:
    displayed = VideoTab(state).generate(OWNER, AUTOMATIC, *fields(**changes))
    if not message:
        last_of(displayed)
        assert workers.videos.calls[0]["negative_prompt"] == "fog"
        return
    assert message in message_of(displayed)
    assert message == "even sides" or not workers.videos.calls


def test_what_is_open_need_not_fit_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second video of a model is made by the pipeline of the first."""
    build("wan").pipe.save_pretrained(tmp_path)
    workers = AppWorkers(AppConfig(devices=devices_of("cpu:2"), chooses_models=True))
    monkeypatch.setattr("app.workers._opened_checked", lambda *_: FakeVideoPipeline())
    pipe = workers.video_pipeline(str(tmp_path), preset_or_plan("cfg=2", 2))
    leave_free(0, monkeypatch)
    assert workers.video_pipeline(str(tmp_path), preset_or_plan("cfg=2", 2)) is pipe
    pipe.close = lambda: None
    workers.close()
    with pytest.raises(PlanError, match="only 0 B are free"):
        workers.video_setup(str(tmp_path))


def test_an_argument_that_the_model_does_not_take_is_named() -> None:
    request = VideoJobRequest.of(**FIELDS)
    with pytest.raises(PlanError, match="takes no num_frames: leave that field empty"):
        request.arguments({"prompt", "height", "width", "num_inference_steps"})


def test_a_model_of_images_is_refused_before_it_is_loaded() -> None:
    setup = AppConfig(devices=devices_of("cpu:2"), chooses_models=True)
    with pytest.raises(PlanError, match="which makes images"):
        AppWorkers(setup).video_setup("embedded")
    with pytest.raises(PlanError, match="its server was started with"):
        AppWorkers(AppConfig(devices=devices_of("cpu:2"))).video_setup("embedded")


@pytest.mark.breadth
def test_a_small_model_of_wan_on_two_workers(queue: JobQueue, tmp_path: Path) -> None:
    build("wan").pipe.save_pretrained(tmp_path / "wan")
    request = VideoJobRequest.of(**{**FIELDS, "model": str(tmp_path / "wan"), "frames": 5, "width": 64})
    setup = AppConfig(devices=devices_of("cpu:2"), chooses_models=True)
    with closing(AppWorkers(setup)) as workers:
        runner, preset = ImageJobRunner(workers), preset_or_plan("cfg=2", 2)
        view = over(queue.submit("A", "video", lambda job: generate_video(runner, job, request, preset, tmp_path)), 200)
    assert view.state == "done", view.error
    assert frames_in(view.result.path) == (5, 8.0, (64, 64))
    assert re.match("cfg=2", str(view.result.run.plan))


def test_files_are_read_beside_the_event_loop(
    state: AppState, workers: FakeVideoWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In it they would hold up every other page."""
    used = list[threading.Thread]()
    monkeypatch.setattr(workers, "video_setup", lambda _: used.append(threading.current_thread()))
    last_of(VideoTab(state).generate(OWNER, "cfg=2", *fields()))
    assert used[0] is not threading.current_thread()
