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

from app.answers import answered
from app.large_tab import LargeTab
from app.page import build
from app.stream_tab import StreamTab
from app.studio import AppState
from app.workers import AppConfig
from patchpar import PlanError
from patchpar.models.files import embedded_model
from tests.unit.test_picture_file import huge_png

from .fakes import FakePipeline, FakeWorkers
from .films import grey_film
from .studios import studio_of
from .test_bad_input import OWNER, fields, said


@pytest.fixture
def studio(monkeypatch: pytest.MonkeyPatch) -> Iterator[AppState]:
    workers = FakeWorkers(FakePipeline())
    workers.setup = AppConfig(face="embedded-face")
    with closing(studio_of(workers)) as found:
        monkeypatch.setenv("GRADIO_TEMP_DIR", str(found.uploads))
        yield found


@pytest.fixture
def page(studio: AppState) -> gr.Blocks:
    return build(studio)


def test_every_handler_of_the_page_answers_for_its_errors(page: gr.Blocks) -> None:
    own = [each.fn for each in page.fns.values() if each.fn is not None and each.fn.__module__.startswith("app.")]
    assert len(own) > 20
    assert [fn for fn in own if not getattr(fn, "is_answered", False)] == []


def test_an_error_that_nobody_foresaw_is_a_sentence_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    @answered(lambda sentence: (sentence, "other"))
    def handler(error: Exception) -> tuple[str, str]:
        raise error

    @answered(lambda sentence: sentence)
    async def generator(error: Exception) -> AsyncIterator[str]:
        yield "first"
        raise error

    @answered()
    def without_output(error: Exception) -> None:
        raise error

    async def all_of() -> list[str]:
        return [each async for each in generator(KeyError("secret"))]

    assert handler(PlanError("steps 0: too few")) == ("steps 0: too few", "other")
    assert caplog.records == []
    with caplog.at_level(logging.ERROR):
        sentence, _ = handler(ValueError("/a/secret/path"))
        assert "ValueError" in sentence
        assert "secret" not in sentence
        assert asyncio.run(all_of()) == ["first", sentence.replace("ValueError", "KeyError")]
        with pytest.raises(gr.Error, match="&lt;b&gt;"):
            without_output(PlanError("<b>"))
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def test_a_file_that_has_been_deleted_is_to_be_chosen_again(studio: AppState, tmp_path: Path) -> None:
    """Uploads go after an hour, also while a page still shows their names."""
    stream, large = StreamTab(studio), LargeTab(studio)
    gone = str(tmp_path / "gone")
    for shown in (
        stream.talk(OWNER, gone, None, "", 1),
        stream.talk(OWNER, None, gone, "", 1),
        stream.draw(OWNER, "A picture", gone, None, 8, 0.6, *fields()),
        stream.draw(OWNER, "A film", None, gone, 8, 0.6, *fields()),
        large.enlarge(OWNER, gone, 2, 0.35, "a fox", 30, 0),
    ):
        assert said(shown) == "this file is no longer here: choose it again"


def test_a_film_that_is_deleted_while_it_waits_its_turn(studio: AppState, tmp_path: Path) -> None:
    film = grey_film(tmp_path / "a.mp4", frames=4, fps=4)
    studio.workers.pictures().go.clear()  # type: ignore[attr-defined]
    first = studio.desk.submit("b" * 32, "image", lambda job: studio.artist.prepare(job))
    shown = StreamTab(studio).draw(OWNER, "A film", None, str(film), 4, 0.6, *fields())
    film_job = asyncio.run(anext_of(shown))
    film.unlink()
    studio.workers.pictures().go.set()  # type: ignore[attr-defined]
    assert first is not None
    assert film_job is not None
    assert said(StreamTab(studio).resume(OWNER)) == "this file is no longer here: choose it again"


async def anext_of(shown: Any) -> Any:
    found = await shown.__anext__()
    await shown.aclose()
    return found


def test_a_stream_that_cannot_begin_leaves_the_one_under_way_in_hand(studio: AppState) -> None:
    go = threading.Event()
    studio.desk.submit(OWNER, "stream", lambda job: go.wait(30))
    studio.desk.keep(OWNER, "controls", "those of the first")
    assert "has a job under way" in said(StreamTab(studio).draw(OWNER, "The prompt alone", None, None, 8, 1, *fields()))
    assert studio.desk.kept(OWNER, "controls") == "those of the first"
    go.set()


def test_the_shipped_example_outlives_the_sweep_of_uploads(page: gr.Blocks, studio: AppState) -> None:
    """Everything that Gradio has copied is deleted an hour later; what the example says is not among it."""
    shown = [each for each in page.blocks.values() if isinstance(each, gr.Dataset) and len(each.samples[0]) == 2]
    assert [row[1] for row in shown[0].samples] == ["speech.wav"] * 3
    assert list(studio.uploads.rglob("*.wav")) == []
    delete_files_created_by_app(page, None)
    assert (embedded_model("embedded-face") / "speech.wav").exists()


def test_gradio_decodes_no_picture_before_a_handler_does(tmp_path: Path, page: gr.Blocks) -> None:
    pictures = [each for each in page.blocks.values() if isinstance(each, gr.Image) and each.interactive is not False]
    assert len(pictures) == 4
    huge = huge_png(tmp_path / "huge.png")
    for each in pictures:
        assert each.preprocess(ImageData(path=str(huge), orig_name="huge.png")) == str(huge)


def test_a_picture_within_a_request_is_not_decoded_either(tmp_path: Path, page: gr.Blocks, studio: AppState) -> None:
    """As some browsers send the camera's."""
    (see,) = (each for each in page.fns.values() if getattr(each.fn, "__name__", "") == "see")
    huge = huge_png(tmp_path / "huge.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(huge).decode()
    values = [None, {"url": url, "path": None, "meta": {"_type": "gradio.FileData"}}]
    _, path = asyncio.run(page.preprocess_data(see, values, None))
    assert Path(path).read_bytes() == huge
    assert Path(path).is_relative_to(studio.uploads)
    with pytest.raises(gr.Error, match="did not arrive whole"):
        asyncio.run(page.preprocess_data(see, [None, {**values[1], "url": url[:-3]}], None))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone.png", "this file is no longer here"),
        ("none.png", "cannot be read as a picture: use PNG"),
        ("huge.png", "the file has too many pixels: at most 40 million are taken"),
    ],
)
def test_what_goes_wrong_before_a_handler_is_said_too(
    studio: AppState, page: gr.Blocks, name: str, sentence: str
) -> None:
    """Gradio opens a picture's file to see what it is."""
    (enlarge,) = (each for each in page.fns.values() if getattr(each.fn, "__name__", "") == "enlarge")
    (studio.uploads / "none.png").write_bytes(b"no picture")
    huge_png(studio.uploads / "huge.png", 30_000)  # beyond what Pillow opens
    values = [None, {"path": str(studio.uploads / name), "meta": {"_type": "gradio.FileData"}}, 2, 0.35, "a fox", 30, 0]
    with pytest.raises(gr.Error, match=sentence):
        asyncio.run(page.preprocess_data(enlarge, values, None))
