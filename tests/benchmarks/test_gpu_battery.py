"""The battery for GPUs: it goes on where it was cut off, writes what it has, and says where there is no GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.battery import __main__ as battery
from benchmarks.gpu.battery import environment, ranks
from benchmarks.gpu.battery.environment import cards, sources_of
from benchmarks.gpu.battery.journal import Journal, Outcome
from benchmarks.gpu.battery.part import MEASUREMENTS, TestReporter, side_by_side
from benchmarks.gpu.battery.part import tests as run_tests
from benchmarks.gpu.battery.parts import INTERRUPTED, PARTS, Part, run_part
from benchmarks.gpu.battery.report import NOT_A_GPU
from benchmarks.gpu.battery.timing import STRATEGIES, WHOLE, Times, left_out
from patchpar.errors import ExchangeError

ROOT = Path(__file__).parents[2]
CARD = "GPU 0: NVIDIA H100 (UUID: GPU-1)"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the battery on a card that is not there; `failing` names parts that fail. What ran, exit code and page."""
    monkeypatch.setattr(battery, "cards", lambda: [CARD])
    monkeypatch.setattr(battery, "python_with", lambda *_: sys.executable)
    monkeypatch.setattr(battery, "torch_of", lambda *_: "torch 2 with 1 GPUs")
    monkeypatch.setattr(battery, "sources_of", lambda *_: "abcd")
    monkeypatch.setattr(battery, "commit_of", lambda *_: "1234abcd")

    def run(*arguments: str, failing: tuple[str, ...] = (), cut_off: str = "") -> tuple[list[str], int, str]:
        ran: list[str] = []

        def part_of(part: Part, *_: Any, known: Any) -> Outcome:
            ran.append(part.name)
            ok = part.name not in failing
            rows, error = [*known, {"ms": 1.25}], "" if ok else "it | broke"
            return Outcome(part=part.name, ok=ok, seconds=1.0, rows=rows, error=error, cut_off="" if ok else cut_off)

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
    assert f"{CARD}: torch 2 with 1 GPUs, commit 1234abcd." in page
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
    assert page.count("Not run yet.") == len(PARTS)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("cards", ["GPU 0: NVIDIA A100 (UUID: GPU-2)"]),
        ("torch_of", "torch 2 with 8 GPUs"),
        ("sources_of", "what is committed, with a change"),
    ],
)
def test_other_gpus_versions_and_sources_are_measured_anew(
    run: Any, monkeypatch: pytest.MonkeyPatch, name: str, answer: object
) -> None:
    run()
    monkeypatch.setattr(battery, name, lambda *_: answer)
    assert run()[0] == [part.name for part in PARTS]


def test_the_page_keeps_parts_that_are_not_asked_for(run: Any) -> None:
    run()
    ran, code, page = run("--parts", "hosted", "--fresh")
    assert (ran, code) == (["hosted"], 0)
    assert page.count("Not run yet.") == len(PARTS) - 1
    ran, code, page = run("--parts", "layers")
    assert page.count("| 1.25 |") == 2


def test_what_is_stopped_says_so_and_goes_on(run: Any) -> None:
    ran, code, page = run(failing=("layers",), cut_off=INTERRUPTED)
    assert (ran, code) == (["facts", "tests", "layers"], 130)
    assert "Cut off (interrupted) after 1 s" in page
    ran, code, page = run()
    assert (ran[0], code) == ("layers", 0)
    assert page.count("| 1.25 |") == len(PARTS) + 1, "a part gets the rows that it had before"


def test_sources_are_those_in_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "patchpar" / "a.py"
    file.parent.mkdir()
    file.write_text("a = 1")
    before = sources_of(tmp_path)
    assert before == sources_of(tmp_path)
    file.write_text("a = 2")
    assert before != sources_of(tmp_path)


class Reported:
    """Rows of reports of pytest."""

    def __init__(self, passed: tuple[str, ...] = ()) -> None:
        self.rows: list[dict[str, Any]] = []
        self.reporter = TestReporter(passed, self.rows.append)

    def report(self, name: str, when: str, outcome: str, longrepr: Any = None) -> None:
        given = {"nodeid": f"tests/gpu/{name}", "when": when, "outcome": outcome, "longrepr": longrepr}
        self.reporter.pytest_runtest_logreport(SimpleNamespace(**given, duration=1.0))


def test_each_test_is_a_row_as_soon_as_it_has_ended() -> None:
    found = Reported()
    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="assert 1 == 2"))
    found.report("test_a.py::test", "setup", "passed")
    assert not found.rows
    found.report("test_a.py::test", "call", "passed")
    found.report("test_b.py::test", "setup", "skipped", ("file", 1, "Skipped: needs two GPUs"))
    found.report("test_c.py::test", "call", "failed", crash)
    found.report("test_d.py::test", "call", "passed")
    found.report("test_d.py::test", "teardown", "failed", "no ranks left")
    assert [(row["test"], row["result"], row["said"]) for row in found.rows] == [
        ("test_a.py::test", "passed", ""),
        ("test_b.py::test", "skipped", "needs two GPUs"),
        ("test_c.py::test", "failed", "assert 1 == 2"),
        ("test_d.py::test", "passed", ""),
        ("test_d.py::test", "failed", "no ranks left"),
    ]
    assert found.rows[0]["seconds"] == 2.0


def test_a_test_that_has_passed_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [{"test": name, "result": result} for name, result in (("a", "passed"), ("b", "skipped"), ("c", "passed"))]
    known.append({"test": "c", "result": "failed"})  # where its fixtures ended
    rows, left = list[Any](), list[str]()

    def collected(options: list[str], plugins: list[TestReporter]) -> pytest.ExitCode:
        items = [SimpleNamespace(nodeid=f"tests/gpu/{name}") for name in "abcd"]
        plugins[0].pytest_collection_modifyitems(items)
        left.extend(item.nodeid[-1] for item in items)
        return pytest.ExitCode.OK

    monkeypatch.setattr(pytest, "main", collected)
    run_tests("cuda", known, rows.append)
    assert rows == known[:1]
    assert left == ["b", "c", "d"]
    monkeypatch.setattr(pytest, "main", lambda *_, **__: pytest.ExitCode.NO_TESTS_COLLECTED)
    run_tests("cuda", known[:1], rows.append)
    with pytest.raises(RuntimeError, match="pytest ended with"):
        run_tests("cuda", [], rows.append)


def test_files_of_tests_run_side_by_side_where_there_are_cores() -> None:
    assert side_by_side(16) == ["-n", "4", "--dist", "loadfile"]
    assert side_by_side(6) == ["-n", "2", "--dist", "loadfile"]
    assert side_by_side(5) == []


def test_a_model_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 * 2**30, 24 * 2**30))
    assert list(left_out("cuda")) == [
        {"model": "flux", "note": "left out: it takes 34 GiB of the GPU, and 24 GiB are free"}
    ]
    assert not list(left_out("cpu"))


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


@pytest.mark.breadth
@pytest.mark.parametrize("part", ["facts", "layers", "overhead", "process", "ranks", "hosted"])
def test_each_part_runs_on_a_cpu(part: str) -> None:
    """With tiny models: its figures mean nothing."""
    rows = list(MEASUREMENTS[part]("cpu"))
    assert rows
    assert not [row for row in rows if row.get("result") == "failed"]
    if part == "layers":
        parts = [row["ms"] for row in rows if row["layer"] != WHOLE]
        assert sum(parts) == pytest.approx(next(row["ms"] for row in rows if row["layer"] == WHOLE))
        assert min(parts) >= 0
    if part == "ranks":
        assert {row["strategy"] for row in rows} == {"plain", *(f"`{strategy}`" for strategy in STRATEGIES)}
        assert all(row["of ideal"] > 0 for row in rows)


def test_a_strategy_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets new ranks, and what the slowest rank took is what a step takes."""
    opened: list[Any] = []

    class Pool:
        def __init__(self, devices: Any, *_: Any, **__: Any) -> None:
            opened.append(devices)

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def call(self, _: str, name: str, strategy: str, **__: Any) -> Any:
            if strategy == "pcpp":
                raise ExchangeError("rank 1 has ended\nwhile it waited")
            kind = "" if strategy == "plain" else "exact"
            own = {(kind, "eager"): Times(4.0, 1.0, 0.0)}
            of_graph = {(kind, "graph"): Times(2.0, 0.1, 0.0)}
            return [own | of_graph, {(kind, "eager"): Times(6.0, 2.0, 0.0)}]

    monkeypatch.setattr(ranks, "LocalExecutor", Pool)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 * 2**30, 24 * 2**30))
    found = list(ranks.ranks("cuda"))
    assert opened == [["cuda:0", "cuda:1"]] * 2
    assert found[0]["note"].startswith("left out")
    assert {row["strategy"]: row.get("of ideal") for row in found[1:]} == {
        "plain": 2.0,
        **{f"`{strategy}`": 2.0 for strategy in STRATEGIES},
        "`pcpp`": None,
    }
    assert [row["note"] for row in found if row.get("result") == "failed"] == ["rank 1 has ended"]
    assert {row["step"] for row in found[1:] if "step" in row} == {"eager", "exact, eager"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [list(row) for row in ranks.ranks("cuda")] == [["note"]]


class Environments:
    """Which Pythons can use the GPU, and what is installed; in the place of processes that are started."""

    def __init__(self, usable: set[str], installs: bool = True) -> None:
        self.usable, self.installs, self.installed = usable, installs, list[list[str]]()

    def succeeds(self, python: str, code: str) -> bool:
        assert "torch.cuda.is_available()" in code
        return python in self.usable

    def run(self, command: list[str], **_: Any) -> None:
        if not self.installs:
            raise subprocess.CalledProcessError(1, command)
        self.installed.append(command)
        if command[-1] == ".[dev]":
            self.usable.add(command[0])


def test_a_torch_with_cuda_is_installed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = str(tmp_path / "bin" / "python")
    found = Environments({sys.executable})
    monkeypatch.setattr(environment, "_succeeds", lambda *args: found.succeeds(*args))
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: found.run(*args, **kwargs))
    assert environment.python_with("cuda", tmp_path, ROOT) == sys.executable
    assert not found.installed
    found.usable.clear()
    assert environment.python_with("cuda", tmp_path, ROOT) == python
    assert [command[-1] for command in found.installed] == [str(tmp_path), f"torch=={environment.TORCH}", ".[dev]"]
    assert environment.python_with("cuda", tmp_path, ROOT) == python
    assert len(found.installed) == 3


@pytest.mark.parametrize(
    ("installs", "says"),
    [
        (False, "could not be installed into .*: the same command tries again"),
        (True, "cannot use the GPU here: .* --venv"),
    ],
)
def test_without_a_torch_for_the_gpu_it_ends_with_a_sentence(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installs: bool, says: str
) -> None:
    found = Environments(set(), installs)
    monkeypatch.setattr(environment, "_succeeds", lambda *_: False)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: found.run(*args, **kwargs))
    monkeypatch.setattr(battery, "python_with", environment.python_with)
    with pytest.raises(FileNotFoundError):  # the page, of which nothing is known
        run()
    assert battery.main() == 1
    assert re.search(says, capsys.readouterr().err)


CHILD = """
import os, subprocess
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print('{"a": %d}' % child.pid, file=rows, flush=True)
"""


def is_gone(pid: int) -> bool:
    """Whether a process ends within seconds; one that nobody has waited for yet has ended."""
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_what_a_crashed_part_leaves_behind_is_ended(tmp_path: Path) -> None:
    part_program(tmp_path, f"{CHILD}os._exit(3)")
    outcome = run_part(PARTS[0], sys.executable, "cuda", 60.0, tmp_path)
    assert outcome.error.startswith("exit code 3")
    assert is_gone(outcome.rows[0]["a"])


def test_an_interrupt_ends_the_part_and_keeps_its_rows(tmp_path: Path) -> None:
    part_program(tmp_path, f"{CHILD}os.kill(os.getppid(), 2); time.sleep(600)")
    outcome = run_part(PARTS[0], sys.executable, "cuda", 60.0, tmp_path)
    assert (outcome.ok, outcome.cut_off) == (False, INTERRUPTED)
    assert is_gone(outcome.rows[0]["a"])


@pytest.mark.skipif(bool(cards()), reason="there is a GPU")
def test_a_machine_without_a_gpu() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.battery", "--minutes", "1"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2
    assert "There is no NVIDIA GPU here" in found.stderr
