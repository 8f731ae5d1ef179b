"""What the README and the pages of docs/ show, works: Python blocks run, command lines parse, links lead somewhere."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from patchpar.cli import app
from patchpar.plan.plan import Plan
from tests.breadth import first_of

REPOSITORY = Path(__file__).parent.parent
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "pipelines").glob("*.md")),
    REPOSITORY / "integrations/comfyui/README.md",
]
BLOCK = re.compile(r"^```(?P<language>\w*)(?P<note>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
VERBS = "|".join(get_command(app).commands)  # type: ignore[attr-defined]
LINK = re.compile(r"(?<!`)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def python_blocks(page: Path, *, runnable: bool) -> list[str]:
    """Blocks to run, or those marked `no-run` because they need a download or GPUs, for which see test_examples.py."""
    blocks = [match for match in BLOCK.finditer(page.read_text()) if match["language"] == "python"]
    return [match["text"] for match in blocks if ("no-run" not in match["note"]) == runnable]


def command_lines(page: Path) -> list[str]:
    """Commands to be typed, without the synopsis of the command line's page and what only explains."""
    return commands_in(page.read_text())


def commands_in(text: str) -> list[str]:
    """Those of a page's text."""
    found = []
    for match in BLOCK.finditer(text):
        if match["language"] in ("", "bash", "sh", "console"):
            lines = match["text"].replace("\\\n", " ").splitlines()
            found += [line.removeprefix("$ ") for line in lines if re.match(rf"(\$ )?patchpar ({VERBS})\b", line)]
    found = [re.sub(r"\s+# .*", "", line) for line in found]
    return [line for line in found if "   " not in line and "..." not in line]


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )


PROSE = ("plan", "streaming", "howto/add-a-strategy")
QUICK = [REPOSITORY / "docs" / f"{page}.md" for page in PROSE]
"""Pages whose blocks start no worker and soon end; those of others run in one process as well, see test_examples.py."""
RUNNABLE = [page for page in PAGES if python_blocks(page, runnable=True)]


@pytest.mark.parametrize("page", first_of(RUNNABLE, *QUICK), ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """All blocks of a page are one script, in order, run by a plain Python in an empty folder."""
    answer = run("\n".join(python_blocks(page, runnable=True)), tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert printed_on(page) <= without_seconds(answer.stdout)


def without_seconds(printed: str) -> set[str]:
    return {re.sub(r"\d+\.\d+ s\b", "N s", line) for line in printed.splitlines()}


def printed_on(page: Path) -> set[str]:
    """Lines that a page shows of what runs of its blocks print: those of a run, whose seconds are a machine's own."""
    text = "".join(match["text"] for match in BLOCK.finditer(page.read_text()) if not match["language"])
    return without_seconds("\n".join(re.findall(r"^plan .*", text, re.MULTILINE)))


def test_a_run_s_line_is_shown() -> None:
    """The control: pages with such lines are found."""
    assert [page.stem for page in RUNNABLE if printed_on(page)] == ["run-statistics"]


def test_those_of_the_readme_run_with_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, whose workers start at once: a Python of their own would import everything anew."""
    script, code = tmp_path / "script.py", "\n".join(python_blocks(PAGES[0], runnable=True))
    script.write_text(re.sub(r"(?<=num_inference_steps=)\d+", "3", code))  # as many as show that it works
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_block_hides_in_a_list(page: Path) -> None:
    """What is indented is no block to the tests here."""
    assert not re.search(r"^[ \t]+```", page.read_text(), re.MULTILINE)


def files_of_a_clone(text: str) -> list[str]:
    """Words of a page's commands that are files of the repository, which a wheel does not have at these paths."""
    words = [word for line in commands_in(text) for word in shlex.split(line)[2:]]
    return [word for word in words if "/" in word and (REPOSITORY / word).exists()]


def test_commands_of_the_readme_need_no_clone() -> None:
    """The installed command works from any folder."""
    assert files_of_a_clone(PAGES[0].read_text()) == []
    found = files_of_a_clone("```\npatchpar upscale assets/figures/samples.png\n```\n")
    assert found == ["assets/figures/samples.png"], "the control"


def test_a_broken_block_would_be_seen(tmp_path: Path) -> None:
    assert run("from patchpar import Plan\nPlan(pach=2)", tmp_path).returncode != 0


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in command_lines(page)])
def test_command_lines_parse(page: Path, line: str) -> None:
    verb, *words = shlex.split(line, comments=True)[1:]
    get_command(app).commands[verb].make_context(verb, words)  # type: ignore[attr-defined]


def unknown_flags(text: str) -> set[str]:
    """Flags of commands within sentences and tables that their verb does not have."""
    found = set()
    for verb, rest in re.findall(rf"`patchpar ({VERBS})\b([^`]*)`", text):
        known = {each for option in get_command(app).commands[verb].params for each in option.opts}  # type: ignore[attr-defined]
        found |= {f"{verb} {flag}" for flag in re.findall(r"--[a-z-]+", rest) if flag not in known}
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_within_sentences_are_flags(page: Path) -> None:
    assert unknown_flags(page.read_text()) == set()


def test_an_unknown_flag_within_a_sentence_would_be_seen() -> None:
    assert unknown_flags("with `patchpar plan M --machine local --trace a.json`") == {"plan --trace"}


def test_plans_beside_the_flags_of_others_parse() -> None:
    page = (REPOSITORY / "docs" / "comparison.md").read_text()
    table = page.partition("## From flags of")[2].partition("\n## ")[0]
    plans = re.findall(r"`((?:data|cfg|stage|patch|tensor)=[^`]+)`", table)
    found = [Plan.parse(plan) for plan in plans]
    assert sorted(plan.world_size for plan in found) == [2] * 3 + [4] * 21
    modes = {plan.strategy.group_norm for plan in found if plan.strategy.name == "displaced"}
    assert modes == {"corrected", "stale", "separate", "sync"}, "those of DistriFusion's code"


def test_there_are_command_lines_to_parse() -> None:
    """Those with a comment behind them too."""
    assert len([line for page in PAGES for line in command_lines(page)]) >= 50
    commented = [line for page in PAGES for line in page.read_text().splitlines() if re.match(r"patchpar .*  # ", line)]
    parsed = {line for page in PAGES for line in command_lines(page)}
    assert len(commented) >= 8
    assert {line.partition("  #")[0].strip() for line in commented} <= parsed


def anchors(page: Path) -> set[str]:
    """Where a page's headings are, as GitHub and the site name these places."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> list[str]:
    """Links of a page with this text that lead to no file, or to no heading of one."""
    dead = []
    for match in LINK.finditer(BLOCK.sub("", text)):
        target, _, anchor = match["target"].partition("#")
        path = page.parent / target if target else page
        if "://" not in target and (not path.exists() or (anchor and anchor not in anchors(path))):
            dead.append(match["target"])
    return dead


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


def test_a_dead_link_would_be_seen() -> None:
    text = "[a](no-such-page.md) [b](docs/cli.md#no-such-heading) [c](docs/cli.md#command-line) [d](#no-such-heading)"
    assert dead_links(PAGES[0], text) == ["no-such-page.md", "docs/cli.md#no-such-heading", "#no-such-heading"]


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_every_page_is_in_the_index(folder: str) -> None:
    index = (REPOSITORY / folder / "README.md").read_text()
    pages = {page.name for page in (REPOSITORY / folder).glob("*.md")} - {"README.md"}
    pages |= {f"howto/{page.name}" for page in (REPOSITORY / folder / "howto").glob("*.md")}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_the_file_tree_is_the_file_tree() -> None:
    """Every module of the package is named in its folder in the tree of docs/architecture.md, and nothing else is."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    (tree,) = [match["text"] for match in BLOCK.finditer(page) if match["text"].startswith("patchpar/")]
    package = REPOSITORY / "patchpar"
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    assert named_in(tree) == {module for module in modules if not module.endswith(("__init__.py", "__main__.py"))}


def test_every_module_of_the_demo_is_in_its_tree() -> None:
    """By its name, or as a tab."""
    named = set(re.findall(r"\b\w+\.py\b", (REPOSITORY / "app" / "README.md").read_text()))
    modules = {path.name for path in (REPOSITORY / "app").glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if not name.endswith("_tab.py")} <= named
    assert {name for name in named if not name.startswith("_")} <= modules


def test_the_file_tree_is_read_by_its_folders() -> None:
    tree = (
        "patchpar/\n  a.py\n  b/   says c.py\n    c.py d.py\n    e/   what\n      f.py\n  g/  what\n    h.py\nassets/"
    )
    assert named_in(tree) == {"a.py", "b/c.py", "b/d.py", "b/e/f.py", "g/h.py"}


def named_in(tree: str) -> set[str]:
    """Modules of a tree: a line that begins with a folder opens it, the other lines name modules of the one open."""
    found, folders = set(), [""]
    for line in tree.splitlines():
        depth, words = (len(line) - len(line.lstrip())) // 2, line.split()
        if words[0].endswith("/"):
            folders[depth:] = [words[0]]
        else:
            found |= {"".join([*folders[1:depth], word]) for word in words}
    return found


def test_make_demo_is_the_first_command_of_the_readme() -> None:
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    (line,) = [line for line in recipe[1].splitlines() if "patchpar generate" in line]
    verb, *words = shlex.split(line)[1:]
    flags = get_command(app).commands[verb].make_context(verb, words).params  # type: ignore[attr-defined]
    assert (verb, flags["devices"], str(flags["output"]), flags["model"]) == ("generate", "2", "demo.png", "embedded")


def missing_messages(page: str, sources: str) -> list[str]:
    """Pieces of the messages in the first column of a page's tables, in italics, that no source has."""
    cells = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    quoted = [message for cell in cells for message in re.findall(r"\*([^*]+)\*", cell)]
    pieces = [piece.strip(" ,'") for message in quoted for piece in re.split(r"…|\b[NM]\b", message)]
    return [piece for piece in pieces if len(piece) > 3 and piece not in sources]


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    """Somebody who searches for a message finds it. Strings that go on in the next line are joined first."""
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    sources = " ".join(path.read_text() for path in sorted((REPOSITORY / "patchpar").rglob("*.py")))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    assert missing_messages(page, sources) == []
    assert missing_messages(page.replace("cannot be split by", "can't be split by"), sources) == [
        "can't be split by tokens"
    ]
