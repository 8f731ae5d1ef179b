"""The help of every verb fits a screen and ends with an example that can be typed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from patchpar.cli import app

LINES, COLUMNS = 24, 80
GROUP: Any = typer.main.get_command(app)
VERBS = sorted(GROUP.commands)


DOCS = Path(__file__).parents[2] / "docs"
EXCEPT = re.compile(r"flags of `(?P<verb>\w+)` except (?P<flags>[^.\n]*?)(?:\.|, and these)")


def displayed(run: Any, *words: str) -> str:
    found = run(*words, "--help")
    assert found.exit_code == 0
    text: str = found.stdout
    return text


def example(text: str) -> str:
    last = text.strip().splitlines()[-1].strip()
    assert last.startswith("Try: patchpar "), last
    return last.removeprefix("Try: ")


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_it_fits_a_screen(run: Any, verb: str) -> None:
    lines = displayed(run, *filter(None, [verb])).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert not [line for line in lines if "…" in line]  # nothing is cut off
    about = lines[lines.index("Commands:") :] if "Commands:" in lines else []
    assert not [line for line in about if line.endswith("...")]


@pytest.mark.parametrize("verb", VERBS)
def test_its_example_can_be_typed(run: Any, verb: str) -> None:
    _, name, *words = shlex.split(example(displayed(run, verb)))
    assert name == verb
    GROUP.commands[verb].make_context(verb, words)  # raises for a flag or an argument that is none


def test_an_example_with_a_wrong_flag_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        GROUP.commands["generate"].make_context("generate", ["a fox", "--device", "2"])


def test_a_verb_imports_neither_other_verbs_nor_progress_bars() -> None:
    """So that a plan that is kept is printed in half a second."""
    code = "import sys, typer, patchpar.cli as c; typer.main.get_command(c.app).commands['plan']; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "patchpar.cli.plan" in loaded
    others = {"patchpar.cli.generate", "patchpar.cli.demo", "rich", "torch", "diffusers", "numpy"}
    assert not others.intersection(loaded)


@pytest.mark.parametrize("verb", VERBS)
def test_it_names_every_flag_with_a_word_on_it(run: Any, verb: str) -> None:
    folded = "--help-all" in {name for each in GROUP.commands[verb].params for name in each.opts}
    text = displayed(run, verb) if not folded else run(verb, "--help-all").stdout
    for parameter in GROUP.commands[verb].params:
        for name in parameter.opts:
            if name.startswith("--"):
                assert re.search(rf"{name}\b.*\n?\s+\S", text), name
        assert getattr(parameter, "help", "") or parameter.name == "help", parameter.name


def test_flags_that_few_need_are_in_the_longer_help_only(run: Any) -> None:
    short, long = displayed(run, "generate"), run("generate", "--help-all").stdout
    assert "--trusted-network" not in short
    assert "--help-all" in short
    assert all(line in long for line in ("--trusted-network", "--mask", *example(short).split()))
    assert displayed(run, "generate") == short, "what was shown once is folded again"


def test_ray_is_offered_where_it_is_taken(run: Any) -> None:
    """Of the other verbs all ranks are on this machine."""
    page = (DOCS / "howto" / "ray.md").read_text()
    taking = re.search(r"On the command line it is `--devices ray:8[^`]*`; (.*?) take it", page)
    assert taking
    offers = {verb for verb in VERBS if "ray:N" in run(verb, "--help-all").stdout}
    assert offers == set(re.findall(r"`(\w+)`", taking[1]))


def section(verb: str) -> str:
    """What the pages say of the flags of a verb."""
    page, heading = ("app.md", "Flags") if verb == "app" else ("cli.md", verb)
    heading = "generate and compare" if verb in ("generate", "compare") else heading
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {heading!r}"
    return found[1]


def documented(verb: str) -> set[str]:
    """The flags of a verb by its section, with those of the verb that it refers to."""
    text = section(verb)
    other = EXCEPT.search(text)
    inherited = set() if other is None else documented(other["verb"]) - set(re.findall(r"--[a-z-]+", other["flags"]))
    return inherited | set(re.findall(r"--[a-z-]+", EXCEPT.sub("", text)))


def flags_of(verb: str) -> set[str]:
    names = {name for each in GROUP.commands[verb].params for name in each.opts if name.startswith("--")}
    return names - {"--help", "--help-all"}


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_is_on_the_page(verb: str) -> None:
    assert flags_of(verb) - documented(verb) == set()
    other = EXCEPT.search(section(verb))
    if other is not None:
        assert set(re.findall(r"--[a-z-]+", other["flags"])).isdisjoint(flags_of(verb))


def test_every_verb_is_in_the_synopsis_of_the_page() -> None:
    synopsis = (DOCS / "cli.md").read_text().split("```")[1]
    assert set(re.findall(r"^patchpar ([a-z]+)\b", synopsis, re.MULTILINE)) == set(VERBS)
