"""The folder of accepted requests: whom its files are for, what a failed write leaves, and what is no request of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchpar import PlanError
from patchpar.serving.request_journal import JournaledRequest, RequestJournal

NAMES = [f"job_{digit * 24}" for digit in "ab"]


def request_of(name: str, created_at: int = 0) -> JournaledRequest:
    kwargs: dict[str, Any] = {"model": "fake", "route": "generation", "request": {}, "seed": 1, "owner": "someone"}
    return JournaledRequest(id=name, created_at=created_at, **kwargs)


def test_only_its_user_can_read_a_request(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        RequestJournal(tmp_path).save(request_of(NAMES[0]))
    finally:
        os.umask(before)
    assert (tmp_path / NAMES[0]).stat().st_mode & 0o777 == 0o700


def test_a_request_that_cannot_be_written_takes_no_room(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path)
    before = sorted(tmp_path.iterdir())
    cyclic: dict[str, Any] = {}
    cyclic["request"] = cyclic
    with pytest.raises(ValueError, match="Circular"):
        journal.save(replace(request_of(NAMES[0]), request=cyclic))
    assert sorted(tmp_path.iterdir()) == before


def test_requests_are_taken_up_in_the_order_they_came_in(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path)
    for name, created_at in zip(NAMES, (2, 1), strict=True):
        journal.save(request_of(name, created_at))
    assert [entry.id for entry in journal.entries("fake")] == NAMES[::-1]


def test_a_request_under_the_name_of_another_stays_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = RequestJournal(tmp_path)
    journal.save(request_of(NAMES[0]))
    (tmp_path / NAMES[0]).rename(tmp_path / NAMES[1])
    assert not list(journal.entries("fake"))
    assert f"{NAMES[1]} cannot be taken up: it has format 1 and is '{NAMES[0]}'" in caplog.text
    assert journal.holds(NAMES[1])


def test_what_has_no_name_of_a_request_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    RequestJournal(tmp_path).remove("images")
    assert (tmp_path / "images").is_dir()


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(PlanError, match="it cannot be written to: change its permissions"):
        RequestJournal(tmp_path)
