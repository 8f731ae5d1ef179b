"""`--trace`: where it goes, what is said of it, and that a bad place stops everything before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

VERBS = ("generate", "compare")


@pytest.mark.parametrize("verb", VERBS)
def test_a_trace_is_recorded_saved_and_named(fake: Any, run: Any, tmp_path: Path, verb: str) -> None:
    trace = tmp_path / "out.json"
    result = run(verb, "a fox", "--devices", 2, "--trace", trace, "-o", tmp_path / "x.png")
    assert result.exit_code == 0, result.output
    assert trace.read_text() == "2 workers, traced: True"  # of compare the side under the plan
    assert f"saved {trace}" in result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_json_says_where_it_is(fake: Any, run: Any, tmp_path: Path, verb: str) -> None:
    trace = tmp_path / "out.json"
    found = json.loads(run(verb, "a fox", "--trace", trace, "--json", "-o", tmp_path / "x.png").stdout)
    assert found["trace"] == str(trace)
    assert str(trace) not in found["outputs"]


@pytest.mark.parametrize("verb", VERBS)
def test_without_it_nothing_is_recorded(fake: Any, run: Any, tmp_path: Path, verb: str) -> None:
    result = run(verb, "a fox", "-o", tmp_path / "x.png")
    assert result.exit_code == 0, result.output
    assert not any(pipe.tracing for pipe in fake.opened)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("name", "reason"), [("missing/out.json", "there is no folder"), ("folder", "it is a folder")])
def test_a_bad_place_stops_it_before_the_run(
    fake: Any, run: Any, tmp_path: Path, verb: str, name: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    result = run(verb, "a fox", "--trace", tmp_path / name, "-o", tmp_path / "x.png")
    assert result.exit_code == 2
    assert reason in result.stderr
    assert not fake.opened


def test_no_permission_names_the_flag(fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere, so chmod proves nothing
    result = run("generate", "a fox", "--trace", tmp_path / "out.json", "-o", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "choose another path with --trace" in result.stderr
    assert not fake.opened
