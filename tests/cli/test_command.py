"""The command itself: quick help, version, and flags that are a promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from patchpar.__main__ import main
from patchpar.cli.compare import CompareFlags
from patchpar.cli.doctor import DoctorFlags
from patchpar.cli.generate import GenerateFlags

ROOT = Path(__file__).parents[2]
SHARED = {
    "prompt", "model", "devices", "plan", "strategy", "height", "width", "steps", "guidance_scale",
    "negative_prompt", "seed", "num_images", "dtype", "variant", "json", "debug", "output",
    "trace", "vae", "deadline", "graphs", "lora", "scheduler", "image", "mask", "strength",
    "secret_file", "trusted_network",
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (GenerateFlags, SHARED),
        (CompareFlags, SHARED),
        (DoctorFlags, {"deadline", "devices", "dtype", "model", "json", "debug", "variant"}),
    ],
)
def test_flags_are_pinned(flags: type, names: set[str]) -> None:
    """A flag once released stays: take one away only with a line in the changelog."""
    assert {field.name for field in fields(flags)} == names


def test_help_imports_nothing_heavy() -> None:
    """So it is quick: 0.2 s on an idle machine."""
    code = "import sys, patchpar.cli; print(sorted({'torch', 'diffusers', 'numpy', 'PIL'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


def test_ctrl_c_while_a_verb_is_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a traceback, and with the exit code that it has later."""

    def interrupted(verb: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("patchpar.cli.command_of", interrupted)
    monkeypatch.setattr("sys.argv", ["patchpar", "generate", "a fox"])
    with pytest.raises(SystemExit) as ending:
        main()
    assert (ending.value.code, capsys.readouterr().err) == (130, "ended by SIGINT\n")


def test_ctrl_c_while_the_command_line_is_imported(tmp_path: Path) -> None:
    """By both names of the command, whose first library to be imported this is."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    module, function = re.findall(r'^patchpar = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    for words in (("-m", "patchpar"), ("-c", f"from {module} import {function}; {function}()")):
        done = subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (130, "ended by SIGINT\n")


def test_version(run: Any) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"patchpar {version('patchpar')}\n")


def test_verbs(run: Any) -> None:
    text = run("--help").stdout
    assert all(verb in text for verb in ("generate", "compare", "doctor"))
    assert run("draw").exit_code == 2
