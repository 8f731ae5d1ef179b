"""What stderr shows of a run that goes on."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from patchpar.cli import app
from patchpar.cli.console import friendly_errors, progress
from patchpar.errors import PlanError


def refused_after(steps: int) -> None:
    with progress("generating") as step:
        for number in range(steps):
            step(number + 1, 4)
        raise PlanError("no such plan")


@pytest.mark.parametrize("steps", [0, 1])
def test_a_bar_is_left_of_a_run_that_has_begun_only(capsys: pytest.CaptureFixture[str], steps: int) -> None:
    """Where the plan is refused, the error stands alone; where a later step fails, the bar says how far it came."""
    with pytest.raises(PlanError):
        refused_after(steps)
    found = capsys.readouterr().err
    assert ("generating" in found and "1/4" in found, found == "") == (steps > 0, steps == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_of_torchrun_has_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with progress("generating") as step:
        step(4, 4)
    assert ("4/4" in capsys.readouterr().err) == (rank == 0)


class FullLog(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_bar_that_cannot_be_written_fails_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where stderr is a log on a full disk: the image is there. Control: an error of the run itself is raised."""
    monkeypatch.setattr(sys, "stderr", FullLog())
    done = []
    with progress("generating") as step:
        step(4, 4)
        done.append("image")
    assert done == ["image"]
    with pytest.raises(PlanError, match="no such plan"):
        refused_after(4)


@pytest.mark.parametrize(
    ("module", "words", "first"),
    [
        ("stream.video", ("stream", "--audio", "embedded", "-o", "a.mp4"), "starting"),
        ("stream.images", ("stream", "a fox", "--input", "images", "-o", "a.mp4"), "starting"),
        ("fifo", ("fifo", "a fox", "--model", "embedded", "-o", "a.mp4"), "starting"),
        ("convert", ("convert", "a.pt", "--to", "folder"), "converting a.pt"),
    ],
    ids=["stream", "images", "fifo", "convert"],
)
def test_a_line_is_shown_before_the_libraries_are_imported(
    module: str, words: tuple[str, ...], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes many seconds, most of them the first time after an installation."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "images" / "a.png")
    monkeypatch.chdir(tmp_path)
    events: list[str] = []

    def line(text: str) -> None:
        events.append(text)
        raise typer.Exit

    monkeypatch.setattr(f"patchpar.cli.{module}.living_line", line, raising=False)
    monkeypatch.setattr("patchpar.models.quiet_libraries.silence_libraries", lambda: events.append("libraries"))
    CliRunner().invoke(app, words)
    assert events == [first]


def test_names_in_files_do_not_command_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of weights, say, in a checkpoint of somebody else: it could erase what stands there, and write its own."""
    with pytest.raises(typer.Exit), friendly_errors(debug=False):
        raise PlanError("a.pt has no weights, but \x1b[2J\x1b]0;owned\x07, \x9b1A, \u202e, größer\n\tand \udcff")
    found = capsys.readouterr().err
    assert found == (
        "error: a.pt has no weights, but \\x1b[2J\\x1b]0;owned\\x07, \\x9b1A, \\u202e, größer\n\tand \\udcff\n"
    )
