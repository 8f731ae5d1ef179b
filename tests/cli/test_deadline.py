"""`--deadline`: of every verb that starts workers, checked before they start, and handed on."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from patchpar.cli.demo import AppFlags, demo_package, serve_app
from patchpar.cli.flags import ImageFlags
from patchpar.cli.stream.flags import StreamFlags

VERBS = {
    "generate": ["a red house"],
    "compare": ["a red house"],
    "video": ["a fox", "--model", "wan"],
    "upscale": [__file__],
    "stream": ["happy", "--output", "talk.mp4"],
    "replay": ["session.jsonl"],
    "fifo": ["a fox", "--model", "wan"],
    "doctor": [],
    "app": [],
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("seconds", ["0", "-3", "inf", "nan"])
def test_one_that_cannot_be_is_refused_before_anything_starts(run: Any, verb: str, seconds: str) -> None:
    found = run(verb, *VERBS[verb], "--deadline", seconds)
    assert found.exit_code == 2
    assert f"--deadline {seconds}: it must be a finite number of seconds above 0" in found.stderr


def test_it_reaches_pipelines_and_streams() -> None:
    assert ImageFlags(prompt=["a"], deadline=7.0).for_loading()["deadline"] == 7.0
    assert StreamFlags(deadline=7.0).for_loading()["deadline"] == 7.0


def test_it_reaches_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    server = import_module(f"{demo_package().__name__}.server")
    served: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda setup, *_: served.append(setup))
    serve_app(AppFlags(deadline=7.0, devices="cpu:2"))
    assert served[0].opening == {"devices": ["cpu", "cpu"], "deadline": 7.0}
