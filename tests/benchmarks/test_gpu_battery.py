"""The battery for GPUs: it goes on where it was cut off, writes what it has, and says where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.battery import __main__ as battery
from benchmarks.gpu.battery.environment import cards
from benchmarks.gpu.battery.journal import Journal, Outcome
from benchmarks.gpu.battery.parts import PARTS, Part, run_part
from benchmarks.gpu.battery.report import NOT_A_GPU

ROOT = Path(__file__).parents[2]
CARD = "GPU 0: NVIDIA H100 (UUID: GPU-1)"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the battery on a card that is not there; `failing` names parts that fail. What ran, exit code and page."""
    monkeypatch.setattr(battery, "cards", lambda: [CARD])
    monkeypatch.setattr(battery, "python_with", lambda *_: sys.executable)

    def run(*arguments: str, failing: tuple[str, ...] = ()) -> tuple[list[str], int, str]:
        ran: list[str] = []

        def part_of(part: Part, *_: Any) -> Outcome:
            ran.append(part.name)
            ok = part.name not in failing
            return Outcome(part=part.name, ok=ok, seconds=1.0, rows=[{"ms": 1.25}], error="" if ok else "it | broke")

        monkeypatch.setattr(battery, "run_part", part_of)
        page = tmp_path / "gpu.md"
        monkeypatch.setattr(sys, "argv", ["battery", "--journal", str(tmp_path), "--write", str(page), *arguments])
        code = battery.main()
        return ran, code, page.read_text()

    return run


def test_everything_passes(run: Any, tmp_path: Path) -> None:
    ran, code, page = run()
    assert ran == [part.name for part in PARTS]
    assert code == 0
    assert CARD in page
    assert "| 1.25 |" in page
    assert NOT_A_GPU not in page
    assert [section["heading"] for section in json.loads((tmp_path / "gpu.json").read_text())][1:] == [
        part.title for part in PARTS
    ]


def test_what_was_finished_is_not_run_again(run: Any) -> None:
    run(failing=("tests",))
    ran, code, page = run()
    assert (ran, code) == (["tests"], 0)
    assert "broke" not in page
    assert run("--fresh")[0] == [part.name for part in PARTS]


def test_a_part_that_fails_stops_no_other(run: Any) -> None:
    ran, code, page = run(failing=("tests",))
    assert ran == [part.name for part in PARTS]
    assert code == 1
    assert "it | broke" in page


def test_without_time_left_the_page_says_so(run: Any) -> None:
    ran, code, page = run("--minutes", "0")
    assert (ran, code) == ([], 1)
    assert page.count("Not run: there was no time left.") == len(PARTS)


def test_other_gpus_are_measured_anew(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    monkeypatch.setattr(battery, "cards", lambda: ["GPU 0: NVIDIA A100 (UUID: GPU-2)"])
    assert run()[0] == [part.name for part in PARTS]


def test_a_line_cut_off_is_as_if_not_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "cuda.jsonl", key="a")
    journal.add(Outcome(part="facts", ok=True, seconds=1.0))
    with (tmp_path / "cuda.jsonl").open("a") as file:
        file.write('{"key": "a", "part": "tests", "ok"')
    assert journal.passed("facts")
    assert journal.latest("tests") is None


def part_program(tmp_path: Path, body: str) -> None:
    """Make `body` what a part runs."""
    folder = tmp_path / "benchmarks" / "gpu" / "battery"
    folder.mkdir(parents=True)
    for package in (folder, *list(folder.parents)[:2]):
        (package / "__init__.py").touch()
    (folder / "part.py").write_text(f"import sys, time\nrows = open(sys.argv[-1], 'w')\n{body}")


@pytest.mark.parametrize(
    ("body", "ok", "says"),
    [
        ("print('{\"a\": 1}', file=rows)", True, ""),
        ("print('{\"a\": 1}', file=rows, flush=True); time.sleep(600)", False, "out of time"),
        ("print('{\"a\": 1}', file=rows, flush=True); raise ValueError('no such kernel')", False, "no such kernel"),
        ('print(\'{"a": 1, "result": "failed"}\', file=rows)', False, "exit code 0"),
        ("pass", False, "exit code 0"),
    ],
    ids=["passes", "is cut off", "breaks", "has a failed test", "finds nothing"],
)
def test_a_part_in_its_own_process(tmp_path: Path, body: str, ok: bool, says: str) -> None:
    """Rows that were written before it was cut off or broke are kept."""
    part_program(tmp_path, body)
    outcome = run_part(PARTS[0], sys.executable, "cpu", 4.0 if "sleep" in body else 100.0, tmp_path)
    assert outcome.ok == ok
    assert says in outcome.error
    assert [row["a"] for row in outcome.rows] == ([1] if body != "pass" else [])


@pytest.mark.skipif(bool(cards()), reason="there is a GPU")
def test_a_machine_without_a_gpu() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.battery", "--minutes", "1"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2
    assert "There is no NVIDIA GPU here" in found.stderr
