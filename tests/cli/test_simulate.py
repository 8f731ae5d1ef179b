"""`patchpar simulate`: a plan on a machine that is not there, as text, JSON and timeline; what cannot be is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from patchpar.cli import app
from patchpar.cli.simulate import megabytes, readable_seconds
from patchpar.pipeline.planner.simulate import simulate as predicted
from tests.breadth import first_of
from tests.tiny import build


def run(*words: str, verb: str = "simulate") -> Any:
    return CliRunner().invoke(app, [verb, *words])


SMALL = ("embedded", "--height", "128", "--width", "128", "--steps", "3")


def test_seconds_bytes_and_memory_as_json(tmp_path: Path) -> None:
    """The parts add up, waits are by kind, and all ranks are on the timeline."""
    words = ("--machine", "2xRTX4090-pcie3", "--plan", "patch=2", "--graphs", "--json", "--trace")
    answer = run(*SMALL, *words, str(tmp_path / "t.json"))
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    step = found["step"]
    assert step["launch"] == 0
    assert step["exposed"]["kv"] > 0
    assert step["seconds"] == pytest.approx(step["compute"] + sum(step["exposed"].values()))
    assert found["seconds"] >= 3 * step["seconds"]
    assert {"kv", "halo", "moments", "prediction"} <= set(found["bytes_sent_per_step"][0])
    assert found["memory_bytes"][0] > 700_000_000
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"encode", "step 0", "decode"} <= {event["name"] for event in events}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("embedded", "--machine", "2xH10O"), "the nearest is H100"),
        (("embedded", "--machine", "locl"), "'locl' cannot be read, the nearest is local"),
        (("embedded", "--machine", "2xH100", "--plan", "patch=4"), "there are 2: change a degree, or use 4 devices"),
        (("embedded", "--machine", "2xH100", "--plan", ""), "--plan is empty"),
        (
            ("embedded", "--machine", "2xH100", "--plan", "patch=2,strategy=structure"),
            "structure gives each rank other",
        ),
        (("embedded", "--machine", "2xH100", "--plan", "auto"), "`patchpar plan` finds the fastest one"),
        (("embedded", "--machine", "2xH100", "--steps", "0"), "--steps 0: it must be at least 1"),
        (("no/where", "--machine", "2xH100"), "hf download no/where --exclude"),
        (("docs", "--machine", "2xH100"), "has no model_index.json"),
        (("embedded", "--machine", "2xH100", "--trace", "/nowhere/t.json"), "/nowhere"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(words: tuple[str, ...], text: str) -> None:
    answer = run(*words)
    assert answer.exit_code == 2
    assert text in answer.stderr


def test_a_model_whose_call_needs_more_than_a_prompt(tmp_path: Path) -> None:
    """It is named; the call as Python has it is simulated."""
    build("sd_img2img").pipe.save_pretrained(tmp_path)
    for verb in ("simulate", "plan"):
        answer = run(str(tmp_path), "--machine", "2xH100", verb=verb)
        assert answer.exit_code == 2, answer.output
        assert "StableDiffusionImg2ImgPipeline, whose call needs image, of which" in answer.stderr
    call: dict[str, Any] = {"image": Image.new("RGB", (64, 64)), "strength": 1.0}
    assert predicted(str(tmp_path), "2xH100", "patch=2", **call).step.seconds > 0


@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_a_folder_without_the_configuration_of_a_network_is_refused_with_what_fetches_it(
    tmp_path: Path, verb: str
) -> None:
    build("ddpm").pipe.save_pretrained(tmp_path)
    shutil.rmtree(tmp_path / "unet")
    answer = run(str(tmp_path), "--machine", "2xH100", verb=verb)
    assert answer.exit_code == 2, answer.output
    assert f"hf download ORG/MODEL unet/config.json --local-dir {tmp_path}" in answer.stderr


def test_a_model_without_a_prompt(tmp_path: Path) -> None:
    build("ddpm").pipe.save_pretrained(tmp_path)
    assert run(str(tmp_path), "--machine", "2xH100", "--plan", "patch=2").exit_code == 0


@pytest.mark.parametrize("plan", first_of(["data=3,cfg=2", "patch=2,strategy=displaced", "cfg=2,patch=4"]))
def test_plans_as_text(plan: str) -> None:
    answer = run("embedded", "--height", "256", "--machine", "8xA100", "--plan", plan)
    assert answer.exit_code == 0, answer.output
    first = [line.split()[0] for line in answer.stdout.splitlines()]
    assert {"plan", "step", "call", "sent", "memory", "assumed"} <= set(first)
    assert ("warm-up" in first) == ("displaced" in plan)
    assert ("held from step to step" in answer.stdout) == ("displaced" in plan)


@pytest.mark.breadth
def test_the_best_plan_is_printed_with_the_others() -> None:
    answer = run(*SMALL, "--machine", "4xA100", verb="plan")
    assert answer.exit_code == 0, answer.output
    first, head, *rows = answer.stdout.splitlines()
    assert first.startswith("plan ")
    assert "step   compute" in head.replace("      ", "   ")
    assert any(row.strip().endswith("single") for row in rows)
    assert any(row.startswith("work ") and "1/" in row for row in rows) == (" single on" not in first)
    found = json.loads(run(*SMALL, "--machine", "4xA100", "--json", verb="plan").stdout)
    assert found["best"] in first
    assert [each["step"]["seconds"] for each in found["plans"]]


def test_plan_refuses_a_machine_that_cannot_be() -> None:
    answer = run("embedded", "--machine", "2xH10O", verb="plan")
    assert answer.exit_code == 2
    assert "the nearest is H100" in answer.stderr


def test_large_figures_have_no_exponent() -> None:
    assert megabytes({"heads": 1_210_000_000, "tokens": 393_000}) == "1,210 MB (heads 1,210, tokens 0.393)"
    assert [readable_seconds(each) for each in (1904.08, 2.345, 0.12345, 0.0012)] == [
        "1,904 s",
        "2.35 s",
        "123 ms",
        "1.2 ms",
    ]
