"""Files on their way to a page are there for an hour, and a stream's film is offered when it is whole."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from app.jobs import JobView
from app.stream_tab import show
from app.streaming import StreamSummary
from app.studio import HOUR, AppState

STREAMED: dict[str, Any] = {"pictures": 4, "seconds": 2.0, "latency": 0.5, "devices": "2 CPU workers"}


def test_files_of_any_page_go_after_an_hour(studio: AppState) -> None:
    old, young = studio.folder_of("a" * 32) / "stream.mp4", studio.folder_of("a" * 32) / "trace.json"
    for path in (old, young):
        path.touch()
    os.utime(old, times=(time.time() - HOUR - 1,) * 2)
    assert studio.folder_of("b" * 32).is_dir()
    assert (old.exists(), young.exists()) == (False, True)


def test_a_film_is_offered_when_its_stream_is_over(tmp_path: Path) -> None:
    film = tmp_path / "stream.mp4"
    film.touch()
    for view, is_offered in (
        (None, False),
        (JobView(state="running"), False),
        (JobView(state="cancelled"), False),
        (JobView(state="done", result=StreamSummary(**STREAMED)), False),
        (JobView(state="done", result=StreamSummary(**STREAMED, film=film)), True),
        (JobView(state="done", result=StreamSummary(**STREAMED, film=tmp_path / "gone.mp4")), False),
    ):
        _, _, save, *_ = show(view)
        assert (save["visible"], save["value"]) == (is_offered, str(film) if is_offered else None)
