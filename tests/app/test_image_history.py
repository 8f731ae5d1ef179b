"""What a page has generated is there after a reload, within limits, with all that is needed to make it again."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import gradio as gr
import numpy as np
import pytest
from PIL import Image

from app import image_history
from app.history_panel import HistoryPanel
from app.image_history import ImageHistory
from app.image_parameters import add_parameters
from app.requests import GenerateRequest
from patchpar import PatchparError, PlanError
from tests.cli.test_output_files import small_disk

from .app_states import state_of


def add(history: ImageHistory, owner: str, seed: int, side: int = 32) -> None:
    history.add(
        owner, add_parameters(Image.new("RGB", (2 * side, side)), GenerateRequest(prompt="a fox", seed=seed), {})
    )


def seeds(history: ImageHistory, owner: str) -> list[int]:
    return [history.request(owner, name).seed for name in history.names(owner)]


def test_the_newest_is_first_and_each_page_has_its_own(tmp_path: Path) -> None:
    history = ImageHistory(tmp_path)
    for owner, seed in (("a", 1), ("b", 2), ("a", 3)):
        add(history, owner, seed, side=400)
    assert (seeds(history, "a"), seeds(history, "b"), seeds(history, "c")) == ([3, 1], [2], [])
    assert [Image.open(path).size for path in history.thumbnails("a")] == [(160, 80)] * 2
    assert Image.open(history.path("a", history.names("a")[0])).size == (800, 400)


def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_history, "MAX_IMAGES", 3)
    history = ImageHistory(tmp_path)
    for seed in range(5):
        add(history, "a", seed)
    assert seeds(history, "a") == [4, 3, 2]
    assert len(list(tmp_path.rglob("*.*"))) == 6, "thumbnails go too"
    monkeypatch.setattr(image_history, "MAX_BYTES", 1)
    add(history, "a", 5)
    assert seeds(history, "a") == [5], "the newest stays, whatever its size"


def test_the_newest_is_first_after_the_clock_was_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be the oldest, and go at once where there are as many as are kept."""
    monkeypatch.setattr(image_history, "MAX_IMAGES", 2)
    history, now = ImageHistory(tmp_path), image_history.time.time_ns()
    for seed, seconds in enumerate((0, 1, -3600)):
        monkeypatch.setattr(image_history.time, "time_ns", lambda at=now + seconds * 10**9: at)
        add(history, "a", seed)
    assert seeds(history, "a") == [2, 1]


def test_pages_that_are_not_used_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_history, "MAX_PAGES", 2)
    history = ImageHistory(tmp_path)
    for owner in "abac":
        add(history, owner, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "c"}


def test_an_image_that_has_gone_is_refused(tmp_path: Path) -> None:
    history = ImageHistory(tmp_path)
    add(history, "a", 1)
    (name,) = history.names("a")
    for owner, wrong in (("a", "0"), ("b", name), ("a", f"../a/{name}")):
        with pytest.raises(PlanError, match=re.escape("no longer here: the last 40")):
            history.path(owner, wrong)


def test_a_full_disk_leaves_nothing_and_is_a_sentence(tmp_path: Path) -> None:
    history, noise = ImageHistory(tmp_path), np.random.default_rng(0).integers(0, 255, (600, 600, 3), np.uint8)
    image = add_parameters(Image.fromarray(noise), GenerateRequest(prompt="a fox"), {})
    with small_disk(), pytest.raises(PatchparError, match="the image cannot be kept: File too large; free some space"):
        history.add("a", image)
    assert list(tmp_path.rglob("*.*")) == []
    history.add("a", image)
    assert len(history.names("a")) == 1, "the control"


def test_a_file_that_another_page_has_deleted_meanwhile(tmp_path: Path) -> None:
    with closing(state_of()) as state:
        old = state.folder_of("a" * 32) / "trace.json"
        old.symlink_to(tmp_path / "deleted")
        assert state.folder_of("b" * 32).is_dir()


def test_a_history_that_cannot_be_read_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(state_of()) as state:
        panel = HistoryPanel(state)
        monkeypatch.setattr(ImageHistory, "thumbnails", refused)
        with pytest.raises(gr.Error, match="Internal error: PermissionError"):
            panel.refresh("a" * 32)


def refused(*_: object) -> None:
    raise PermissionError
