"""What is painted over is generated anew, the rest stays; files are checked before they are decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException
from gradio.components.image_editor import EditorData
from gradio.data_classes import FileData
from PIL import Image, ImageDraw

from app.edit import ImageEdit, mask_of, size_of
from app.edit_tab import EditTab
from app.image_parameters import read_parameters
from app.mask_editor import MAX_LAYERS, MAX_WAITING, check, mask_editor
from app.state import AppState
from patchpar import PlanError
from tests.media.test_image_file import huge_png

from .app_states import state_of
from .fakes import FakePipeline, FakeWorkers
from .test_bad_input import OWNER, message_of
from .test_history_panel import last_of

FIELDS = ("a fox", "fog", 4, 3.5, 7)


class EditingWorkers(FakeWorkers):
    """Remembers which pipeline was used."""

    def __init__(self) -> None:
        super().__init__(FakePipeline(more=("image", "mask_image", "strength")))
        self.used: list[str] = []

    def upscaler(self) -> Any:
        self.used.append("image-to-image")
        return self.pipe

    def inpainter(self) -> Any:
        self.used.append("inpainting")
        return self.pipe


@pytest.fixture
def state() -> Iterator[AppState]:
    with closing(state_of(EditingWorkers())) as found:
        yield found


def painted(*boxes: tuple[int, int, int, int], size: tuple[int, int] = (200, 130)) -> dict[str, Any]:
    layer = Image.new("RGBA", size)
    for box in boxes:
        ImageDraw.Draw(layer).rectangle(box, fill=(255, 255, 255, 255))
    return {"background": Image.new("RGBA", size, "teal"), "layers": [layer], "composite": None}


def test_images_are_scaled_beside_the_event_loop(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    """In it they would hold up every other page."""
    used = list[threading.Thread]()
    scaled = ImageEdit.of

    def noted(*values: Any, **fields: Any) -> ImageEdit:
        used.append(threading.current_thread())
        return scaled(*values, **fields)

    monkeypatch.setattr(ImageEdit, "of", noted)
    last_of(EditTab(state).generate(OWNER, painted(), 192, 0.5, *FIELDS))
    assert used[0] is not threading.current_thread()


def test_what_is_not_painted_over_stays(state: AppState) -> None:
    image, status, facts, *_ = last_of(EditTab(state).generate(OWNER, painted((0, 0, 99, 129)), 192, 0.5, *FIELDS))
    assert "done" in status
    assert "Time" in facts
    assert state.workers.used == ["inpainting"]  # type: ignore[attr-defined]
    (call,) = state.workers.upscaler().calls  # type: ignore[attr-defined]
    assert (call["image"].size, call["mask_image"].size, call["strength"]) == ((192, 128), (192, 128), 0.5)
    assert (call["height"], call["width"], call["prompt"], call["negative_prompt"]) == (128, 192, "a fox", "fog")
    values, before = np.asarray(image), np.asarray(Image.new("RGB", (192, 128), "teal"))
    assert (values[:, 100:] == before[:, 100:]).all()
    assert (values[:, :80] != before[:, :80]).mean() > 0.9
    (name,) = state.history.names(OWNER)
    assert read_parameters(state.history.path(OWNER, name)).seed == 7


def test_without_paint_all_of_it_is_generated(state: AppState) -> None:
    image, *_ = last_of(EditTab(state).generate(OWNER, painted(), 192, 0.5, *FIELDS))
    assert state.workers.used == ["image-to-image"]  # type: ignore[attr-defined]
    (call,) = state.workers.upscaler().calls  # type: ignore[attr-defined]
    assert "mask_image" not in call
    assert not {"height", "width"} & set(call), "it has the size of the image"
    assert image.size == (192, 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 192, 0.5), "there is no image: choose one"),
        (({"background": None, "layers": []}, 192, 0.5), "there is no image: choose one"),
        ((painted(), None, 0.5), "longer side None"),
        ((painted(), 9999, 0.5), "longer side 9999"),
        ((painted(), 192, 0), "strength 0"),
        ((painted(), 192, 0.1), "strength 0.1 leaves none"),
    ],
)
def test_what_cannot_be_is_a_sentence(state: AppState, arguments: tuple[Any, ...], message: str) -> None:
    assert message in message_of(EditTab(state).generate(OWNER, *arguments, *FIELDS))
    assert state.workers.used == []  # type: ignore[attr-defined]


def test_sizes_and_masks() -> None:
    assert size_of(Image.new("L", (1000, 500)), 512) == (512, 256)
    assert size_of(Image.new("L", (10, 1000)), 512) == (64, 512)
    assert mask_of([Image.new("RGBA", (8, 8))], (64, 64)) is None
    faint = Image.new("RGBA", (8, 8), (255, 255, 255, 3))
    mask = mask_of([faint], (64, 64))
    assert mask.getextrema() == (255, 255), "half-transparent paint counts"


def test_files_are_checked_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = huge_png(tmp_path / "huge.png", 9_400)
    editor = mask_editor("Image")
    for file in (SimpleNamespace(path=str(huge)), huge.read_bytes()):
        with pytest.raises(PlanError, match="9400 x 9400 pixels"):
            editor.convert_and_format_image(file)
    with pytest.raises(PlanError, match="choose it again"):
        check(SimpleNamespace(path=str(tmp_path / "gone.png")))
    monkeypatch.setattr("app.limits.MAX_BYTES", 10)
    with pytest.raises(PlanError, match="at most 0 MB"):
        check(bytes(11))
    assert editor.convert_and_format_image(None) is None


def test_one_file_as_many_layers_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """A small file may be 160 MB of pixels, and be named as often as a request is long."""
    Image.new("RGBA", (64, 64)).save(tmp_path / "paint.png")
    file, editor, decoded = FileData(path=str(tmp_path / "paint.png")), mask_editor("Image"), list[Any]()
    few, many = (EditorData(background=file, layers=[file] * number) for number in (MAX_LAYERS, MAX_LAYERS + 1))
    assert len(editor.preprocess(few)["layers"]) == MAX_LAYERS, "the control"
    assert editor.preprocess(None) is None
    editor.convert_and_format_image = lambda *_, **__: decoded.append(1)
    with pytest.raises(PlanError, match=f"{MAX_LAYERS + 1} layers of paint: at most {MAX_LAYERS} are taken"):
        editor.preprocess(many)
    assert decoded == []


def test_images_that_wait_for_their_run_are_few() -> None:
    """Gradio makes room for as many layers as the number of one says, and forgets no image whose run never begins."""
    editor = mask_editor("Image")
    assert editor.accept_blobs._is_server_fn, "for Gradio's route"

    def send(name: str, index: str, kind: str = "layer") -> None:
        data: Any = {"type": kind, "index": index, "id": name}
        editor.accept_blobs(SimpleNamespace(data=data, files=[("blob", b"image")]))

    for number in range(MAX_WAITING + 3):
        send(str(number), "0")
        send(str(number), "null", "background")
    assert [*editor.blob_storage] == [str(number) for number in range(3, MAX_WAITING + 3)]
    for index in (str(MAX_LAYERS), "1000000000", "-1", "²"):
        with pytest.raises(HTTPException, match="413"):
            send("0", index)
    assert "0" not in editor.blob_storage


def test_gradio_leaves_no_file_beside_the_source() -> None:
    """As it does for a subclass of one of its components."""
    assert list((Path(__file__).parents[2] / "app").glob("*.pyi")) == []


def test_what_is_transparent_is_white(state: AppState) -> None:
    """The editor hands over black there, which nobody sees."""
    image = painted(size=(192, 128))
    image["background"] = Image.new("RGBA", (192, 128), (0, 0, 0, 0))
    image["background"].paste((0, 128, 128, 255), (0, 0, 96, 128))
    last_of(EditTab(state).generate(OWNER, image, 192, 0.5, *FIELDS))
    (call,) = state.workers.upscaler().calls  # type: ignore[attr-defined]
    assert [call["image"].getpixel((x, 64)) for x in (0, 191)] == [(0, 128, 128), (255, 255, 255)]


def test_the_file_says_by_which_model_and_plan(state: AppState) -> None:
    last_of(EditTab(state).generate(OWNER, painted(), 192, 0.5, *FIELDS))
    (name,) = state.history.names(OWNER)
    text = Image.open(state.history.path(OWNER, name)).info["parameters"]
    assert "Denoising strength: 0.5, Model: embedded, Plan: " in text
