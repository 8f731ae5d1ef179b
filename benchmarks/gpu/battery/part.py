"""Run one part of the battery in this process; each row of its table is written to `--rows` as soon as it is known."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.battery import hosted, timing
from benchmarks.gpu.quiet import quiet_process

Row = dict[str, Any]


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


def tests(device: str) -> Iterator[Row]:
    """Yield a row for each test marked `gpu`."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        options = ["-m", "gpu", "-p", "no:cacheprovider", "-q", f"--gpu-device={device}", f"--junitxml={report}"]
        code = pytest.main([*options, "tests/gpu"])
        for case in ElementTree.parse(report).iter("testcase"):
            outcome = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
            message = case.find(outcome)
            yield {
                "test": case.get("name"),
                "result": "failed" if outcome in ("failure", "error") else outcome,
                "seconds": float(case.get("time", 0)),
                "said": "" if message is None else str(message.get("message", ""))[:200],
            }
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code}")


PARTS: dict[str, Callable[[str], Iterator[Row]]] = {
    "facts": facts,
    "tests": tests,
    "layers": timing.layers,
    "overhead": timing.overhead,
    "hosted": hosted.hosted,
}


def main() -> int:
    """Run the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    quiet_process()
    with options.rows.open("w") as file:
        for row in PARTS[options.part](options.device):
            file.write(json.dumps(row, default=str) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
