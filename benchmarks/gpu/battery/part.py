"""Run one part of the battery in this process; each row of its table is written to `--rows` as soon as it is known."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.battery import hosted, process, ranks, timing
from benchmarks.gpu.quiet import quiet_process

Row = dict[str, Any]
MOST_SIDE_BY_SIDE, CORES_OF_EACH = 4, 3
RANKS_ON_ONE = 3  # that use NCCL where there is one GPU


def facts(device: str) -> Iterator[Row]:
    """Yield what doctor finds: versions, host, each GPU."""
    from patchpar.cli.doctor import host, versions
    from patchpar.cli.gpu_facts import gpu_software, graphics_cards

    yield {"what": "device of this run", "found": device}
    for name, value in {**versions(), **host(), **gpu_software()}.items():
        yield {"what": name, "found": value}
    for card in graphics_cards():
        for name, value in card.items():
            yield {"what": f"{card['device']} {name}", "found": value}


def tests(device: str, known: Sequence[Row], write: Callable[[Row], None]) -> None:
    """Write a row for each test marked `gpu` as soon as it has ended; first those that have passed before, as `known`.

    These are not run again. Raises RuntimeError if pytest cannot run the tests.
    """
    import pytest
    import torch

    from patchpar.launch.devices import available_cores

    failed = {row["test"] for row in known if row["result"] == "failed"}
    passed = [row for row in known if row["result"] == "passed" and row["test"] not in failed]
    for row in passed:
        write(row)
    reporter = TestReporter([row["test"] for row in passed], write)
    options = ["-m", "gpu", "-p", "no:cacheprovider", "-q", f"--gpu-device={device}"]
    if not passed:  # only this process knows them
        options += side_by_side(available_cores())
    if device == "cuda" and torch.cuda.device_count() == 1:
        options.append(f"--ranks-per-gpu={RANKS_ON_ONE}")
    code = pytest.main([*options, "tests/gpu"], plugins=[reporter])
    has_run = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if code not in has_run and not (passed and code == pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {code}")


def side_by_side(cores: int) -> list[str]:
    """Return pytest's options for the files of tests in several processes, if there are cores and pytest-xdist."""
    processes = min(MOST_SIDE_BY_SIDE, cores // CORES_OF_EACH)
    has_xdist = importlib.util.find_spec("xdist") is not None
    return ["-n", str(processes), "--dist", "loadfile"] if has_xdist and processes > 1 else []


class TestReporter:
    """A plugin of pytest that leaves out tests that have `passed`, and writes a row for each other one when it ends."""

    __test__ = False

    def __init__(self, passed: Collection[str], write: Callable[[Row], None]) -> None:
        self._passed, self._write = frozenset(passed), write
        self._seconds: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what has passed."""
        items[:] = [item for item in items if _name_of(item.nodeid) not in self._passed]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write a row for a test that has run, was skipped, or failed where its fixtures begin or end."""
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._write(
                {
                    "test": _name_of(report.nodeid),
                    "result": report.outcome,
                    "seconds": self._seconds[report.nodeid],
                    "said": _message_of(report)[:200],
                }
            )


def _name_of(nodeid: str) -> str:
    return nodeid.removeprefix("tests/gpu/")


def _message_of(report: Any) -> str:
    """Return why a test was skipped or has failed, in short; empty for one that has passed."""
    if report.outcome == "skipped":
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr or "") if crash is None else str(crash.message)


MEASUREMENTS: dict[str, Callable[[str], Iterator[Row]]] = {
    "facts": facts,
    "layers": timing.layers,
    "overhead": timing.overhead,
    "process": process.process,
    "compiled": timing.compiled,
    "ranks": ranks.ranks,
    "hosted": hosted.hosted,
}


def main() -> int:
    """Run the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["tests", *MEASUREMENTS])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--known", type=Path, help="rows of an earlier run that was cut off")
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    quiet_process()
    with options.rows.open("w") as file:

        def write(row: Row) -> None:
            file.write(json.dumps(row, default=str) + "\n")
            file.flush()

        if options.part == "tests":
            known = options.known.read_text().splitlines() if options.known else ()
            tests(options.device, list(map(json.loads, known)), write)
        else:
            for row in MEASUREMENTS[options.part](options.device):
                write(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
