"""`patchpar simulate`: a plan on a machine that is not there, as text, JSON and timeline; what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from patchpar.cli import app
from tests.breadth import first_of


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *words])


SMALL = ("embedded", "--height", "128", "--width", "128", "--steps", "3")


def test_seconds_bytes_and_memory_as_json(tmp_path: Path) -> None:
    """Slower links take longer, the parts add up, and all ranks are on the timeline."""
    found = []
    for machine in ("2xRTX4090-pcie3", "2xH100-nvlink"):
        answer = run(*SMALL, "--machine", machine, "--plan", "patch=2", "--json", "--trace", str(tmp_path / "t.json"))
        assert answer.exit_code == 0, answer.output
        found.append(json.loads(answer.stdout))
    slow, fast = found
    assert slow["step"]["seconds"] > fast["step"]["seconds"] > 0
    for each in found:
        step = each["step"]
        assert step["seconds"] == pytest.approx(step["compute"] + step["launch"] + sum(step["exposed"].values()))
        assert each["seconds"] >= 3 * step["seconds"]
        assert each["bytes_sent_per_step"] == slow["bytes_sent_per_step"]
        assert {"kv", "halo", "moments", "prediction"} <= set(each["bytes_sent_per_step"][0])
        assert each["memory_bytes"][0] > 700_000_000
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"encode", "step 0", "decode"} <= {event["name"] for event in events}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("embedded", "--machine", "2xH10O"), "the nearest is H100"),
        (("embedded", "--machine", "2xH100", "--plan", "patch=4"), "takes 4 devices, but there are 2"),
        (
            ("embedded", "--machine", "2xH100", "--plan", "patch=2,strategy=structure"),
            "structure gives each rank other",
        ),
        (("embedded", "--machine", "2xH100", "--steps", "0"), "--steps 0: it must be at least 1"),
        (("no/where", "--machine", "2xH100"), "is no folder here"),
        (("embedded", "--machine", "2xH100", "--trace", "/nowhere/t.json"), "/nowhere"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(words: tuple[str, ...], text: str) -> None:
    answer = run(*words)
    assert answer.exit_code == 2
    assert text in answer.stderr


@pytest.mark.parametrize("plan", first_of(["data=3,cfg=2", "patch=2,strategy=displaced", "cfg=2,patch=4"]))
def test_plans_as_text(plan: str) -> None:
    answer = run(*SMALL, "--height", "256", "--machine", "8xA100", "--plan", plan)
    assert answer.exit_code == 0, answer.output
    first = [line.split()[0] for line in answer.stdout.splitlines()]
    assert {"plan", "step", "call", "sent", "memory", "assumed"} <= set(first)
    assert ("warm-up" in first) == ("displaced" in plan)
