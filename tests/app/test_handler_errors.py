"""Nothing that goes wrong on the page is silent, and nothing that people gave it is needed when it has been deleted."""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from gradio.data_classes import ImageData
from gradio.route_utils import delete_files_created_by_app

from app.handler_errors import reports_errors
from app.high_res_tab import LargeTab
from app.page import build
from app.state import AppState
from app.stream_tab import StreamTab
from app.workers import AppConfig
from patchpar import PlanError
from patchpar.models.files import embedded_model
from tests.media.test_image_file import huge_png

from .app_states import state_of
from .fakes import FakePipeline, FakeWorkers
from .test_bad_input import OWNER, fields, message_of
from .videos import grey_video


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[AppState]:
    workers = FakeWorkers(FakePipeline())
    workers.setup = AppConfig(face="embedded-face")
    with closing(state_of(workers)) as found:
        monkeypatch.setenv("GRADIO_TEMP_DIR", str(found.uploads))
        yield found


@pytest.fixture
def page(state: AppState) -> gr.Blocks:
    return build(state)


def test_every_handler_of_the_page_reports_for_its_errors(page: gr.Blocks) -> None:
    own = [each.fn for each in page.fns.values() if each.fn is not None and each.fn.__module__.startswith("app.")]
    assert len(own) > 20
    assert [fn for fn in own if not getattr(fn, "reports_errors", False)] == []


def test_an_error_that_nobody_foresaw_is_a_sentence_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    @reports_errors(lambda message: (message, "other"))
    def handler(error: Exception) -> tuple[str, str]:
        raise error

    @reports_errors(lambda message: message)
    async def generator(error: Exception) -> AsyncIterator[str]:
        yield "first"
        raise error

    @reports_errors()
    def without_output(error: Exception) -> None:
        raise error

    async def all_of() -> list[str]:
        return [each async for each in generator(KeyError("secret"))]

    assert handler(PlanError("steps 0: too few")) == ("steps 0: too few", "other")
    assert caplog.records == []
    with caplog.at_level(logging.ERROR):
        message, _ = handler(ValueError("/a/secret/path"))
        assert "ValueError" in message
        assert "secret" not in message
        assert asyncio.run(all_of()) == ["first", message.replace("ValueError", "KeyError")]
        with pytest.raises(gr.Error, match="&lt;b&gt;"):
            without_output(PlanError("<b>"))
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def test_a_file_that_has_been_deleted_is_to_be_chosen_again(state: AppState, tmp_path: Path) -> None:
    """Uploads go after an hour, also while a page still shows their names."""
    stream, high_res = StreamTab(state), LargeTab(state)
    gone = str(tmp_path / "gone")
    for displayed in (
        stream.talk(OWNER, gone, None, "", 1, False),
        stream.talk(OWNER, None, gone, "", 1, False),
        stream.generate(OWNER, "An image", gone, None, 8, 0.6, *fields()),
        stream.generate(OWNER, "A video", None, gone, 8, 0.6, *fields()),
        high_res.upscale(OWNER, gone, 2, 0.35, "a fox", 30, 0),
    ):
        assert message_of(displayed) == "this file is no longer here: choose it again"


def test_a_video_that_is_deleted_while_it_waits_its_turn(state: AppState, tmp_path: Path) -> None:
    video = grey_video(tmp_path / "a.mp4", frames=4, fps=4)
    state.workers.image_pipeline().go.clear()  # type: ignore[attr-defined]
    first = state.job_queue.submit("b" * 32, "image", lambda job: state.image_runner.prepare(job))
    displayed = StreamTab(state).generate(OWNER, "A video", None, str(video), 4, 0.6, *fields())
    video_job = asyncio.run(anext_of(displayed))
    video.unlink()
    state.workers.image_pipeline().go.set()  # type: ignore[attr-defined]
    assert first is not None
    assert video_job is not None
    assert message_of(StreamTab(state).resume(OWNER)) == "this file is no longer here: choose it again"


async def anext_of(displayed: Any) -> Any:
    found = await displayed.__anext__()
    await displayed.aclose()
    return found


def test_a_stream_that_cannot_begin_leaves_the_one_under_preset_in_hand(state: AppState) -> None:
    go = threading.Event()
    state.job_queue.submit(OWNER, "stream", lambda job: go.wait(30))
    state.job_queue.store(OWNER, "controls", "those of the first")
    assert "already has a job" in message_of(
        StreamTab(state).generate(OWNER, "The prompt alone", None, None, 8, 1, *fields())
    )
    assert state.job_queue.stored(OWNER, "controls") == "those of the first"
    go.set()


def test_the_shipped_example_outlives_the_sweep_of_uploads(page: gr.Blocks, state: AppState) -> None:
    """Everything that Gradio has copied is deleted an hour later; what the example says is not among it."""
    displayed = [each for each in page.blocks.values() if isinstance(each, gr.Dataset) and len(each.samples[0]) == 2]
    assert [row[1] for row in displayed[0].samples] == ["speech.wav"] * 3
    assert list(state.uploads.rglob("*.wav")) == []
    delete_files_created_by_app(page, None)
    assert (embedded_model("embedded-face") / "speech.wav").exists()


def test_gradio_decodes_no_image_before_a_handler_does(tmp_path: Path, page: gr.Blocks) -> None:
    images = [each for each in page.blocks.values() if isinstance(each, gr.Image) and each.interactive is not False]
    assert len(images) == 4
    huge = huge_png(tmp_path / "huge.png")
    for each in images:
        assert each.preprocess(ImageData(path=str(huge), orig_name="huge.png")) == str(huge)


def test_an_image_within_a_request_is_not_decoded_either(tmp_path: Path, page: gr.Blocks, state: AppState) -> None:
    """As some browsers send the camera's."""
    (receive_frame,) = (each for each in page.fns.values() if getattr(each.fn, "__name__", "") == "receive_frame")
    huge = huge_png(tmp_path / "huge.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(huge).decode()
    values = [None, {"url": url, "path": None, "meta": {"_type": "gradio.FileData"}}]
    _, path = asyncio.run(page.preprocess_data(receive_frame, values, None))
    assert Path(path).read_bytes() == huge
    assert Path(path).is_relative_to(state.uploads)
    with pytest.raises(gr.Error, match="is incomplete"):
        asyncio.run(page.preprocess_data(receive_frame, [None, {**values[1], "url": url[:-3]}], None))


@pytest.mark.parametrize("field", [None, "background"])
def test_no_other_server_is_asked_for_a_file(
    page: gr.Blocks, field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradio fetches addresses, of any size, into the folder of uploads."""
    asked = list[str]()

    async def fetched(url: str, **_: Any) -> str:
        asked.append(url)
        raise OSError("not in a test")

    monkeypatch.setattr("gradio.processing_utils.async_ssrf_protected_download", fetched)
    (upscale,) = (each for each in page.fns.values() if getattr(each.fn, "__name__", "") == "upscale")
    file = {"path": "https://files.example/large.png", "meta": {"_type": "gradio.FileData"}}
    values = [None, file if field is None else {field: file}, 2, 0.35, "a fox", 30, 0]
    with pytest.raises(gr.Error, match="the file is an address: no other server is asked for files"):
        asyncio.run(page.preprocess_data(upscale, values, None))
    assert asked == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.png", "this file is no longer here"),
        ("none.png", "cannot be read as an image: use PNG"),
        ("huge.png", "the file has too many pixels: at most 40 million are taken"),
    ],
)
def test_what_goes_wrong_before_a_handler_is_reported_too(
    state: AppState, page: gr.Blocks, name: str, message: str
) -> None:
    """Gradio opens an image's file to see what it is."""
    (upscale,) = (each for each in page.fns.values() if getattr(each.fn, "__name__", "") == "upscale")
    (state.uploads / "none.png").write_bytes(b"no image")
    huge_png(state.uploads / "huge.png", 30_000)  # beyond what Pillow opens
    values = [None, {"path": str(state.uploads / name), "meta": {"_type": "gradio.FileData"}}, 2, 0.35, "a fox", 30, 0]
    with pytest.raises(gr.Error, match=message):
        asyncio.run(page.preprocess_data(upscale, values, None))
