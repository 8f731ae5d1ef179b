"""Arguments that are read without typer are those that typer reads, and all others are left to it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from patchpar.cli import app, folded_help

GROUP: Any = typer.main.get_command(app)
PLAIN = (
    "embedded --machine 8xH100-nvlink",
    "--machine=2xA100 ./model --height 512 --width=768 --steps 4 --guidance-scale 3.5 --dtype float16 --json",
    "embedded --machine 2xA100 --guidance-scale -1 --graphs --debug --strategy displaced:warmup_steps=2",
    "embedded --machine ''",
)
LEFT = (
    "embedded --machine 8xH100 --steps 4.0",
    "embedded --machine 8xH100 --steps four",
    "embedded --machine 8xH100 --guidance-scale 1e1",
    "embedded --machine 8xH100 --dtype float99",
    "embedded --machine",
    "embedded",
    "--machine 8xH100",
    "embedded other --machine 8xH100",
    "embedded --machine 8xH100 --help",
    "embedded --machine 8xH100 --nothing",
)


def parsed(words: str) -> dict[str, Any] | str:
    """The values of `plan`, those that are not given too; or the message."""
    command = GROUP.commands["plan"]
    try:
        found = command.make_context("plan", shlex.split(words)).params
    except Exception as error:  # noqa: BLE001 (of click, whose classes typer has copies of)
        return f"{type(error).__name__}: {error}"
    values = {each.name: each.default for each in command.params} | found
    return {name: value for name, value in values.items() if name != folded_help.HELP_ALL}  # whose callback acts


def by_typer(words: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any] | str:
    with monkeypatch.context() as without:
        without.setattr(folded_help, "plain_arguments", lambda *_: None)
        return parsed(words)


@pytest.mark.parametrize("words", PLAIN)
def test_plain_arguments_are_those_of_typer(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = []

    def noted(*arguments: Any) -> Any:
        answers.append(real(*arguments))
        return answers[-1]

    real = folded_help.plain_arguments
    monkeypatch.setattr(folded_help, "plain_arguments", noted)
    found = parsed(words)
    assert answers[-1] is not None, "typer has read it"
    assert found == by_typer(words, monkeypatch)
    assert isinstance(found, dict)


@pytest.mark.parametrize("words", LEFT)
def test_all_others_are_left_to_typer_with_its_messages(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(words) == by_typer(words, monkeypatch)


def test_a_list_and_a_path_are_left_to_typer() -> None:
    found = GROUP.commands["generate"].make_context("generate", ["a fox", "--image", "fox.png"]).params
    assert found["prompt"] == ["a fox"] or found["prompt"] == ("a fox",)
    assert Path(found["image"]) == Path("fox.png")  # which it makes a path of here or at the call, by its version
