"""Pages of figures that are measured in pieces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.diagrams import __main__ as diagrams
from benchmarks.page import main, priority, publish_section, sections_of, write_page, write_section

OPENING = "# Things\n\nMeasured.\n"


def table(value: str) -> str:
    """A table of one cell."""
    return f"| size |\n|---|\n| {value} |"


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "things.md"
    for heading, value in (("small", "1"), ("large", "8"), ("small", "2")):
        write_section(OPENING, heading, table(value), file)
    sections = json.loads(file.with_suffix(".json").read_text())
    assert [each["heading"] for each in sections] == ["", "small", "large"]
    assert [each["tables"][0][0]["size"] for each in sections[1:]] == ["2", "8"]
    assert file.read_text() == f"{OPENING}\n## small\n\n{table('2')}\n\n## large\n\n{table('8')}\n"


def test_a_cell_may_have_a_bar(tmp_path: Path) -> None:
    """As the message of a failed test has one: the program would end without its page."""
    file = tmp_path / "things.md"
    write_page("| test | said |\n|---|---|\n| a | x \\| y is None |\n| b |  |\n", file)
    (section,) = json.loads(file.with_suffix(".json").read_text())
    assert section["tables"] == [[{"test": "a", "said": "x | y is None"}, {"test": "b", "said": ""}]]


def test_sections_are_written_as_they_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is cut off later leaves those before it, and a section by itself leaves the others."""
    file = tmp_path / "things.md"
    publish_section(OPENING, "small", table("1").splitlines(), file)

    def cut_off() -> Iterator[str]:
        yield "| size |"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_section(OPENING, "large", cut_off(), file)
    assert capsys.readouterr().out.endswith("## large\n\n| size |\n")
    assert sections_of(file) == {"small": table("1")}
    publish_section(OPENING, "other", ["| size |"], None)
    assert sections_of(tmp_path / "nothing.md") == {}


def test_a_page_says_that_its_ranks_went_before_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for policy, says in ((os.SCHED_RR, True), (os.SCHED_FIFO, True), (os.SCHED_OTHER, False)):
        monkeypatch.setattr(os, "sched_getscheduler", {0: policy}.__getitem__)
        assert ("real time" in priority()) is says


def test_the_json_of_pages_that_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page that is not there is named, before any other is written."""
    file, absent = tmp_path / "things.md", tmp_path / "others.md"
    file.write_text(table("3"))
    with pytest.raises(SystemExit, match="2"):
        main([str(file), str(absent)])
    assert f"there is no {absent}" in capsys.readouterr().err
    assert not file.with_suffix(".json").exists()
    main([str(file)])
    assert json.loads(file.with_suffix(".json").read_text())[0]["tables"] == [[{"size": "3"}]]


@pytest.mark.parametrize("program", [main, diagrams.main])
def test_help_writes_nothing(program: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("a file was written"))
    with pytest.raises(SystemExit, match="0"):
        program(["--help"])
