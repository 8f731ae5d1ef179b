"""Files on their way to a page are there for an hour, and a stream's video is offered when it is whole."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from app.image_stream import StreamSummary
from app.job_queue import JobView
from app.state import HOUR, AppState
from app.stream_tab import show

STREAMED: dict[str, Any] = {"images": 4, "seconds": 2.0, "latency": 0.5, "devices": "2 CPU workers"}


def test_files_of_any_page_go_after_an_hour(state: AppState) -> None:
    old, young = state.folder_of("a" * 32) / "stream.mp4", state.folder_of("a" * 32) / "trace.json"
    for path in (old, young):
        path.touch()
    os.utime(old, times=(time.time() - HOUR - 1,) * 2)
    assert state.folder_of("b" * 32).is_dir()
    assert (old.exists(), young.exists()) == (False, True)


def test_a_video_is_offered_when_its_stream_is_over(tmp_path: Path) -> None:
    video = tmp_path / "stream.mp4"
    video.touch()
    for view, is_offered in (
        (None, False),
        (JobView(state="running"), False),
        (JobView(state="cancelled"), False),
        (JobView(state="done", result=StreamSummary(**STREAMED)), False),
        (JobView(state="done", result=StreamSummary(**STREAMED, video=video)), True),
        (JobView(state="done", result=StreamSummary(**STREAMED, video=tmp_path / "gone.mp4")), False),
    ):
        _, _, save, *_ = show(view)
        assert (save["visible"], save["value"]) == (is_offered, str(video) if is_offered else None)
