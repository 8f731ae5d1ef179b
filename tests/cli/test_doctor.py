"""`patchpar doctor`: it starts real workers, and says so when they cannot work together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from patchpar.cli.doctor import collective_test, versions
from patchpar.errors import WorkerDied
from patchpar.launch.local import LocalExecutor


def test_two_workers_add_up() -> None:
    found = collective_test(["cpu"])
    assert found["error"] is None
    assert found["ok"]
    assert found["devices"] == ["cpu", "cpu"]


@pytest.mark.parametrize("answer", [[1, 0], [2, 2]])
def test_a_wrong_sum_is_a_failure(monkeypatch: pytest.MonkeyPatch, answer: list[int]) -> None:
    monkeypatch.setattr(LocalExecutor, "call", lambda *_: answer)
    found = collective_test(["cpu"])
    assert not found["ok"]
    assert str(answer) in found["error"]


def test_json(fake: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalExecutor, "call", lambda *_: [1, 1])
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {"versions", "host", "devices", "links", "collective", "plan"}
    assert found["plan"]["chosen"] == "cfg=2"
    assert found["host"]["cores"] >= 1
    assert fake.opened[0].closed


def test_text_says_what_fails_and_exits_with_1(fake: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any) -> None:
        raise WorkerDied("rank 1 (cpu) died with exit code -9")

    monkeypatch.setattr(LocalExecutor, "call", dies)
    result = run("doctor")
    assert result.exit_code == 1
    assert "FAILS: rank 1 (cpu) died with exit code -9" in result.stdout
    assert "guidance is on and there are two devices" in result.stdout


def test_devices_that_do_not_exist(fake: Any, run: Any) -> None:
    result = run("doctor", "--devices", "tpu:0")
    assert result.exit_code == 2
    assert "'tpu:0' is not a device" in result.stderr


def test_versions() -> None:
    assert versions()["torch"] not in ("", "missing")
