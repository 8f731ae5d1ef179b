"""What a code host reads of the repository: workflows run what is there, issue forms ask for what exists."""

from __future__ import annotations

import re
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

REPOSITORY = Path(__file__).parent.parent
WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (REPOSITORY / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_a_script_of_the_repository(path: Path) -> None:
    commands = [step["run"] for job in read(path)["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        program, script = command.split()
        assert program == "bash"
        assert (REPOSITORY / script).is_file()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_the_output_of_doctor(path: Path) -> None:
    labels = [field["attributes"].get("label", "") for field in read(path)["body"]]
    assert "Output of `patchpar doctor --json`" in labels


def test_there_are_some() -> None:
    assert WORKFLOWS
    assert FORMS


def test_badges_say_what_the_metadata_says() -> None:
    package, readme = metadata("patchpar"), (REPOSITORY / "README.md").read_text()
    badges = dict(re.findall(r"!\[(\w+) ([^]]+)\]\(https://img\.shields\.io/badge/", readme))
    assert badges == {
        "Python": f"{package['Requires-Python'].removeprefix('>=')}+",
        "License": package["License-Expression"],
    }
    for name, value in re.findall(r"/badge/(\w+)-(\S+)-blue\)", readme):
        assert unquote(value).replace("--", "-") == badges[name.title()]


def test_the_citation_is_of_this_version() -> None:
    """In its own file, and where the pages say how to cite."""
    assert read(REPOSITORY / "CITATION.cff")["version"] == version("patchpar")
    assert f"version = {{{version('patchpar')}}}" in (REPOSITORY / "docs" / "faq.md").read_text()
