"""What a message of a job costs: outputs left as they are, previews, and what has not changed since the last one."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from copy import deepcopy
from io import BytesIO
from typing import Any

import gradio as gr
import pytest
from gradio.state_holder import SessionState
from PIL import Image

from app.blocks import PageBlocks, Preview, preview_of
from app.handler_errors import ErrorReportingBlocks
from app.job_queue import JobView
from app.job_updates import changes_of

from .app_states import state_of

SKIPPED = {"__type__": "update"}
IMAGE = Image.linear_gradient("L").resize((96, 64)).convert("RGB")


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with closing(state_of()) as state:
        monkeypatch.setenv("GRADIO_TEMP_DIR", str(state.uploads))
        yield state.uploads


def event_of(kind: type[gr.Blocks]) -> tuple[gr.Blocks, Any]:
    """A page of this kind, and its event."""
    with kind() as page:
        button, output, notes = gr.Button(), gr.Image(format="png"), gr.State("")
        outputs = [output, gr.HTML(), gr.Gallery(), gr.Column(), notes, gr.Slider(0, 9)]
        button.click(lambda: None, None, outputs)
    (event,) = page.fns.values()
    return page, event


def outputs_of(kind: type[gr.Blocks], predictions: list[Any]) -> tuple[list[Any], Any]:
    """What the browser gets, and what the session remembers."""
    page, event = event_of(kind)
    session = SessionState(page)
    return asyncio.run(page.postprocess_data(event, deepcopy(predictions), session)), session


def notes_in(session: Any) -> Any:
    """What the session keeps for the gr.State."""
    (notes,) = (each for each in session.blocks_config.blocks.values() if isinstance(each, gr.State))
    return session[notes._id]


@pytest.mark.parametrize(
    "predictions",
    [
        [gr.skip()] * 6,
        [gr.skip(), "<p>", gr.skip(), gr.skip(), gr.skip(), gr.skip()],
        [gr.skip(), "<p>", gr.skip(), gr.update(visible=False), "name", gr.update(value=3, interactive=False)],
        [None, "", [], gr.skip(), gr.skip(), 4],
        gr.skip(),
    ],
)
def test_outputs_are_those_of_gradio(uploads: Any, predictions: Any) -> None:
    found, session = outputs_of(PageBlocks, predictions)
    wanted, other = outputs_of(ErrorReportingBlocks, predictions)
    if predictions == [gr.skip()] * 6:  # Gradio adds that the properties of HTML have not changed either
        assert wanted[1].pop("props") == SKIPPED
    assert found == wanted
    assert notes_in(session) == notes_in(other)


def test_what_is_skipped_is_not_built_anew(uploads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: Gradio builds it."""
    built: list[str] = []
    init = gr.Gallery.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        built.append("gallery")
        init(self, *args, **kwargs)

    for kind, times in ((PageBlocks, 0), (ErrorReportingBlocks, 1)):
        page, event = event_of(kind)
        session = SessionState(page)
        with monkeypatch.context() as patch:
            patch.setattr(gr.Gallery, "__init__", counted)
            built.clear()
            asyncio.run(page.postprocess_data(event, [gr.skip(), "<p>", *[gr.skip()] * 4], session))
        assert len(built) == times


def test_a_preview_is_in_the_message_itself(uploads: Any) -> None:
    """The control: a finished image is a file, which keeps every value."""
    (output, *_), _ = outputs_of(PageBlocks, [Preview(IMAGE), *[gr.skip()] * 5])
    assert not list(uploads.rglob("*.*"))
    kind, _, data = output["url"].partition(";base64,")
    assert (kind, output["path"]) == ("data:image/jpeg", None), "with a path Gradio would give it an address"
    assert Image.open(BytesIO(base64.b64decode(data))).size == IMAGE.size
    (output, *_), _ = outputs_of(PageBlocks, [IMAGE, *[gr.skip()] * 5])
    assert [Image.open(path).tobytes() for path in uploads.rglob("*.png")] == [IMAGE.tobytes()]


def test_the_preview_of_a_job() -> None:
    assert preview_of(None) == preview_of(JobView(state="running")) == SKIPPED
    assert preview_of(JobView(state="running", preview=IMAGE)) == Preview(IMAGE)


def test_only_what_has_changed_is_sent() -> None:
    other = IMAGE.rotate(180)

    async def updates() -> AsyncIterator[Any]:
        yield Preview(IMAGE), "step 1", "", gr.update(interactive=False), IMAGE
        yield Preview(IMAGE), "step 2", "", gr.update(interactive=False), IMAGE
        yield Preview(other), "step 2", gr.skip(), gr.update(interactive=True), IMAGE.copy()
        yield Preview(other), "step 2", "", gr.update(interactive=True), gr.update(value=other)

    async def sent() -> list[Any]:
        return [
            [number for number, value in enumerate(each) if value != SKIPPED] async for each in changes_of(updates())
        ]

    assert asyncio.run(sent()) == [[0, 1, 2, 3, 4], [1], [0, 3, 4], [2, 4]]


def test_a_single_output_is_sent_each_time() -> None:
    async def updates() -> AsyncIterator[Any]:
        yield "step 1"
        yield "step 1"

    async def sent() -> list[Any]:
        return [each async for each in changes_of(updates())]

    assert asyncio.run(sent()) == ["step 1", "step 1"]
