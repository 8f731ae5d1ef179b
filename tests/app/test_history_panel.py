"""What a page has generated is kept, can be looked at again, and sets the fields."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from PIL import Image

from app.image_parameters import add_parameters, read_parameters
from app.image_tab import ImageTab
from app.presets import presets_for
from app.requests import GenerateRequest
from app.state import AppState

from .app_states import state_of
from .test_bad_input import OWNER, fields, message_of

AUTOMATIC = presets_for(2)[0].label
IMAGE, STATUS, FACTS, START, CANCEL, PANEL, GALLERY, CHOSEN = range(8)


@pytest.fixture
def state() -> Iterator[AppState]:
    with closing(state_of()) as found:
        yield found


def last_of(displayed: Any) -> tuple[Any, ...]:
    """What the outputs have at the end; one that an update skips stays as it is."""

    async def last() -> tuple[Any, ...]:
        found: tuple[Any, ...] = ()
        async for each in displayed:
            if not isinstance(each, tuple):  # a single output
                found = each
                continue
            kept = found or each
            found = tuple(old if new == gr.skip() else new for old, new in zip(kept, each, strict=True))
        return found

    return asyncio.run(asyncio.wait_for(last(), 30))


def generate(state: AppState, count: int = 1, **changes: Any) -> tuple[Any, ...]:
    """Outputs of the button, then those of the history."""
    tab = ImageTab(state)
    outputs = last_of(tab.generate(OWNER, AUTOMATIC, "", "", False, count, *fields(**changes)))
    return *outputs, *tab.history.refresh(OWNER)


def selected(file: str) -> Any:
    return SimpleNamespace(value={"image": {"orig_name": Path(file).name}})


def test_several_images_have_seeds_that_follow_and_come_back_after_a_reload(state: AppState) -> None:
    outputs = generate(state, 3, seed=7, negative="fog")
    files = outputs[GALLERY]
    assert (len(files), outputs[PANEL]["visible"], outputs[CHOSEN]) == (3, True, "")
    assert [call["generator"].initial_seed() for call in state.workers.image_pipeline().calls] == [7, 8, 9]  # type: ignore[attr-defined]
    found = read_parameters(Path(files[0]).with_suffix(".png"))
    assert (found.seed, found.prompt, found.negative) == (9, "a fox", "fog"), "the newest is first"
    assert "Model: embedded, Plan: " in Image.open(Path(files[0]).with_suffix(".png")).info["parameters"]
    assert set(state.kinds_of(OWNER)) == {"image"}
    assert state.kinds_of("b" * 32) == []
    again = last_of(ImageTab(state).resume(OWNER))
    assert again[GALLERY] == files
    assert last_of(ImageTab(state).resume("b" * 32))[GALLERY] == [], "another page sees its own only"


def test_a_model_s_folder_goes_by_its_name(state: AppState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its path begins with ~, as it may in the list of models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "private" / "mine").mkdir(parents=True)
    for model in (str(tmp_path / "private" / "mine"), "~/private/mine"):
        monkeypatch.setattr(state.workers, "setup", replace(state.workers.setup, model=model))
        (file, *_) = generate(state)[GALLERY]
        text = Image.open(Path(file).with_suffix(".png")).info["parameters"]
        assert ("Model: mine, " in text, "private" in text) == (True, False)


def test_what_is_displayed_can_be_reused(state: AppState) -> None:
    files = generate(state, 2, seed=4, steps=3, width=192)[GALLERY]
    panel = ImageTab(state).history
    path, notice, facts, name = panel.choose(OWNER, selected(files[1]))
    assert read_parameters(path).seed == 4
    assert "From the history" in notice
    assert "192 x 128" in facts
    status, *values = panel.reuse(OWNER, name)
    assert "alert" not in status
    assert values == ["a fox", "", 192, 128, 3, 4.0, 4]
    assert panel.reuse_seed(OWNER, "")[1] == 5, "without a choice, that of the newest"


def test_an_image_of_another_program_sets_the_fields(state: AppState, tmp_path: Path) -> None:
    request = GenerateRequest(prompt="a <b>cat</b>", seed=3, width=512)
    image = add_parameters(Image.new("RGB", (8, 8)), request, {})
    generated = tmp_path / "a.png"
    state.history.add(OWNER, image)
    generated.write_bytes(state.history.path(OWNER, state.history.names(OWNER)[0]).read_bytes())
    status, prompt, *_, seed = ImageTab(state).history.read(str(generated))
    assert ("alert" in status, prompt, seed) == (False, "a <b>cat</b>", 3)


def test_what_is_not_there_is_a_sentence(state: AppState, tmp_path: Path) -> None:
    panel = ImageTab(state).history
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    for outputs, message in (
        (panel.reuse(OWNER, ""), "there is no image yet"),
        (panel.reuse_seed(OWNER, ""), "there is no image yet"),
        (panel.reuse(OWNER, "../0"), "there is no image yet"),
        (panel.read(None), "there is no image: choose"),
        (panel.read(str(tmp_path / "plain.png")), "has no parameters"),
        (panel.choose(OWNER, selected("1.webp")), "this image is no longer here"),
    ):
        alert = next(text for text in outputs if isinstance(text, str) and "alert" in text)
        assert message in re.sub("<[^>]*>", "", alert)


@pytest.mark.parametrize(
    ("count", "changes", "message"),
    [(0, {}, "images 0"), (9, {}, "images 9"), (None, {}, "images None"), (2, {"seed": 2**53 - 1}, "seed 9007")],
)
def test_how_many(state: AppState, count: Any, changes: dict[str, Any], message: str) -> None:
    displayed = ImageTab(state).generate(OWNER, AUTOMATIC, "", "", False, count, *fields(**changes))
    assert message in message_of(displayed)
    assert not state.history.names(OWNER)
