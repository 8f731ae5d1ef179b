"""Commands that the pages name are there: modules and their flags, targets of make, folders of tests, what draws."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import patchpar
from patchpar.cli import app
from patchpar.models.info import describe
from tests import tiny
from tests.test_readme import PAGES, REPOSITORY, command_lines, name
from tests.test_refusals import Typed

MODULE = re.compile(r"python -m (?P<module>(?:benchmarks|training|tests|patchpar)[\w.]*)(?P<flags>[^`|\n]*)")
MAKE = re.compile(r"(?:`|^)make (?P<target>[a-z-]+)", re.MULTILINE)
FOLDER = re.compile(r"pytest (?P<paths>(?:tests/\S+?)(?: tests/\S+?)*)(?=[`\s|])")
GENERATES = ("generate", "compare")
PLACEHOLDERS = ("PATH", "path/to/model")
"""What pages write where the reader is to put the model of theirs."""


def named(pattern: re.Pattern[str], *parts: str) -> set[tuple[str, ...]]:
    return {tuple(match[part] for part in parts) for page in PAGES for match in pattern.finditer(page.read_text())}


def source_of(module: str) -> str:
    """Of a module and what it takes from its neighbours, or of a package."""
    spec = find_spec(module)
    assert spec is not None, f"there is no {module}"
    assert spec.origin is not None
    path = Path(spec.origin)
    if path.name == "__init__.py":
        return "".join(each.read_text() for each in path.parent.glob("*.py"))
    text = path.read_text()
    around = re.findall(rf"^from {module.rpartition('.')[0]}\.(\w+) import", text, re.MULTILINE)
    return text + "".join((path.parent / f"{each}.py").read_text() for each in around)


@pytest.mark.parametrize(("module", "flags"), sorted(named(MODULE, "module", "flags")))
def test_a_module_has_the_flags_that_it_is_called_with(module: str, flags: str) -> None:
    source = source_of(module.rstrip("."))
    for flag in re.findall(r"--[a-z-]+", flags):
        assert has_flag(source, flag), f"{module} has no {flag}"


def has_flag(source: str, flag: str) -> bool:
    """Whether a flag is written there, or is a name of those of which flags are made."""
    name = flag.removeprefix("--")
    is_made = 'f"--{' in source and re.search(rf'"{name}"|\b{name}="', source) is not None
    return f'"{flag}"' in source or is_made


def test_a_module_or_flag_that_is_none_would_be_seen() -> None:
    with pytest.raises(AssertionError, match=r"there is no benchmarks\.nothing"):
        source_of("benchmarks.nothing")
    source = source_of("benchmarks.volumes")
    assert "rank" in source
    assert not has_flag(source, "--rank")


def test_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    wanted = {target for (target,) in named(MAKE, "target")}
    assert wanted - targets == set()
    assert len(wanted) >= 8


def test_make_writes_every_page_of_figures_again() -> None:
    """Of `benchmarks.quality --table` without a name it is the page of that name; `make gpu` writes its own."""
    makefile = (REPOSITORY / "Makefile").read_text().replace("--table --plot", "--table docs/figures/quality.md --plot")
    written = set(re.findall(r"(?:--write|--table) docs/figures/([\w-]+\.md)", makefile))
    assert written | {"gpu.md"} == {page.name for page in (REPOSITORY / "docs" / "figures").glob("*.md")}
    assert re.search(r"^figures: .*\bdiagrams\b", makefile, re.MULTILINE)


def test_the_page_of_methods_has_every_page_of_figures() -> None:
    """With a command in the last column, and that of coverage, which lies elsewhere."""
    rows = re.findall(r"^\| .* \|$", (REPOSITORY / "docs" / "performance.md").read_text(), re.MULTILINE)
    with_command = "".join(
        row for row in rows if re.search(r"`(?:python -m benchmarks|make )", row.rpartition(" | ")[2])
    )
    missing = {
        page.name
        for page in (REPOSITORY / "docs/figures").glob("*.md")
        if f"({page.name})" not in with_command.replace("figures/", "")
    }
    assert missing == {"gpu.md"}, "`make gpu` has a paragraph of its own"


def test_folders_of_tests() -> None:
    paths = {path for (found,) in named(FOLDER, "paths") for path in found.split()}
    assert {path for path in paths if not (REPOSITORY / path).exists()} == set()
    assert len(paths) >= 5


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page in PAGES for line in command_lines(page) if line.split()[1] in GENERATES],
    ids=lambda value: name(value) if isinstance(value, Path) else "",
)
def test_commands_that_generate_could_be_run(
    page: Path, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plan, strategy, devices and size are asked what the real pipeline asks; a stand-in draws."""
    monkeypatch.setattr(patchpar, "ParallelPipeline", Typed)
    monkeypatch.setattr(Typed, "opened", [])
    monkeypatch.setattr(Typed, "model_known", describe(tiny.build("sdxl").pipe))
    monkeypatch.chdir(tmp_path)
    words: list[Any] = shlex.split(line, comments=True)[1:]
    words = ["embedded" if word in PLACEHOLDERS else word for word in words]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert [*tmp_path.glob("*.png")]
