"""`patchpar bench`: a table and a plot of plans beside one process, which goes on where it was interrupted."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from diffusers import DDIMScheduler

from benchmarks.quality.generation import hash_of
from benchmarks.quality.known import rows_of_page
from patchpar.cli.bench.flags import BenchFlags
from patchpar.cli.bench.records import BenchKey, BenchRecord, BenchSetting, RecordFile
from patchpar.cli.bench.runner import machine_of
from patchpar.cli.bench.table import markdown, rows_of
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.files import embedded_model
from patchpar.pipeline.rank_stats import RankStats
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan
from tests.cli.conftest import FakePipeline
from training.scenes import held_out_captions

SETTING = BenchSetting(
    model="tiny 0123",
    dtype="float32",
    scheduler="DDIMScheduler",
    height=None,
    width=64,
    steps=3,
    guidance_scale=3.5,
    negative_prompt=None,
    loras=("a.safetensors:0.5",),
    libraries="diffusers 1, torch 2",
)
RECORD = BenchRecord(
    key=BenchKey(SETTING, "a fox", 7, "patch=2", "cpu, cpu; 2 cores"),
    devices=("cpu", "cpu"),
    psnr_db=40.0,
    ssim=0.9,
    lpips=None,
    bytes_per_step=1000,
    seconds=2.0,
    single_seconds=3.0,
    waited=0.5,
    steps=3,
    exact_steps=1,
)


class FakeBenchPipeline(FakePipeline):
    """Images of plans differ from those of one process by 0.01, and pcpp is not supported."""

    scheduler = SimpleNamespace()

    def submit(self, *, plan: Plan, ranks: tuple[int, ...], generator: Any, **arguments: Any) -> Any:
        if plan.strategy.name == "pcpp":
            raise UnsupportedModel("this model is not for pcpp")
        self.calls.append({**arguments, "plan": plan, "seed": generator.initial_seed()})
        image = np.random.default_rng(generator.initial_seed()).random((16, 16, 3)) * 0.9 + 0.01 * (len(ranks) > 1)
        stats = [
            RankStats(rank=rank, device="cpu", bytes_sent={"halo": 300 * rank}, bytes_received={}, seconds_waited={})
            for rank in ranks
        ]
        run = Run(plan=plan, seconds=4.0 / len(ranks), ranks=tuple(stats))
        return SimpleNamespace(result=lambda: SimpleNamespace(images=[image]), run=run)


@pytest.fixture
def bench(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("patchpar.ParallelPipeline", FakeBenchPipeline, raising=False)
    monkeypatch.setattr(FakePipeline, "opened", [])
    return lambda *words: run("bench", *words, "--devices", "cpu:4", "--json", "-o", tmp_path / "out")


def test_a_table_of_strategies_ranks_and_steps(bench: Any, tmp_path: Path) -> None:
    words = ["--strategy", "exact", "--strategy", "fresh-edges", "--ranks", 2, "--ranks", 4, "--steps", 3, "--steps", 5]
    result = bench("a fox", "a house", *words, "--plan", "cfg=2,patch=2", "--seed", 10)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["rows"]) == 2 * 5
    row = next(each for each in found["rows"] if each["plan"] == "patch=4,strategy=exact")
    assert (row["prompts"], row["seconds"], row["single_seconds"]) == (2, 1.0, 4.0)
    assert row["psnr_db"] == pytest.approx(40.0)
    (pipe,) = FakePipeline.opened
    singles = [call for call in pipe.calls if call["plan"].world_size == 1]
    assert [call["seed"] for call in singles if call["num_inference_steps"] == 3] == [10, 11], "once for all plans"
    table = (tmp_path / "out/table.md").read_text()
    assert "## 3 steps" in table
    assert "## 5 steps" in table
    assert "| cfg=2,patch=2,strategy=exact | 2 | 40.0 |" in table
    assert ElementTree.parse(tmp_path / "out/plot.svg").getroot().tag.endswith("svg")


def test_what_hosts_know_one_another_by_is_passed_on(bench: Any) -> None:
    bench("a fox", "--strategy", "exact", "--secret-file", "my.secret")
    bench("a house", "--strategy", "exact", "--trusted-network")
    assert [pipe.options.get("secret_file") for pipe in FakePipeline.opened] == [Path("my.secret"), None]
    assert [pipe.options.get("trusted_network") for pipe in FakePipeline.opened] == [None, True]


def test_what_is_known_is_not_measured_again(bench: Any, tmp_path: Path) -> None:
    bench("a fox", "--strategy", "exact")
    bench("a fox", "a house", "--strategy", "exact", "--strategy", "displaced")
    first, second = FakePipeline.opened
    assert {call["prompt"] for call in first.calls} == {"a fox"}
    again = [call for call in second.calls if call["prompt"] == "a fox" and call["plan"].world_size > 1]
    assert {call["plan"].strategy.name for call in again} == {"displaced"}
    assert len((tmp_path / "out/records.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(143)])
def test_who_interrupts_it_is_told_that_it_goes_on(
    ending: BaseException, bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = FakeBenchPipeline.submit

    def interrupted(self: Any, **arguments: Any) -> Any:
        if arguments["prompt"] == "a house":
            raise ending
        return submit(self, **arguments)

    monkeypatch.setattr(FakeBenchPipeline, "submit", interrupted)
    found = bench("a fox", "a house", "--strategy", "exact")
    assert found.exit_code != 0
    assert f"{tmp_path / 'out/records.jsonl'} has 1 image: the same command goes on from there" in found.stderr
    monkeypatch.setattr(FakeBenchPipeline, "submit", submit)
    assert "goes on" not in bench("a fox", "a house", "--strategy", "exact").stderr


def test_a_plan_that_is_refused_stops_no_other(bench: Any, tmp_path: Path) -> None:
    result = bench("a fox", "a house", "--strategy", "pcpp", "--strategy", "exact")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [row["plan"] for row in found["rows"]] == ["patch=4,strategy=exact"]
    assert found["refused"] == {"patch=4,strategy=pcpp": "this model is not for pcpp"}
    assert "this model is not for pcpp" in (tmp_path / "out/table.md").read_text()


def test_steps_that_the_scheduler_refuses(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence, which names the number among several; what was measured before stays."""
    submit = FakeBenchPipeline.submit

    def refused(self: Any, **arguments: Any) -> Any:
        self.scheduler.set_timesteps(arguments["num_inference_steps"])
        return submit(self, **arguments)

    monkeypatch.setattr(FakeBenchPipeline, "scheduler", DDIMScheduler())
    monkeypatch.setattr(FakeBenchPipeline, "submit", refused)
    result = bench("a fox", "--strategy", "exact", "--steps", 3, "--steps", 99999)
    assert result.exit_code == 2
    assert "error: --steps 99999: DDIMScheduler, the scheduler of this model, refuses it" in result.stderr
    assert len((tmp_path / "out/records.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no prompt"),
        (["a fox", "--ranks", 8], "takes 8 ranks, but there are 4 devices"),
        (["a fox", "--ranks", 0], "--ranks 0: it must be at least 1"),
        (["a fox", "--ranks", 1, "--strategy", "exact"], "no plan takes more than 1 rank"),
        (["a fox", "--strategy", "fresh"], "fresh-edges"),
        (["a fox", "--guidance-scale", "inf"], "--guidance-scale inf: it must be a finite number"),
        (["--prompts", "nowhere.txt"], "nowhere.txt: it cannot be read"),
        (["a fox", "--seed", -1], "--seed -1: it must be at least 0"),
        (["a fox", "--scheduler", "DDIN"], "--scheduler DDIN: diffusers has none of that name; use DDIM"),
    ],
)
def test_bad_flags(bench: Any, words: list[Any], message: str) -> None:
    result = bench(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not any(pipe.calls for pipe in FakePipeline.opened)


@pytest.mark.parametrize(
    ("folder", "message"),
    [(__file__, "it is a file; name a folder"), ("no/such/folder", "the folder cannot be made (No such file or")],
)
def test_a_folder_that_cannot_be_made(folder: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        BenchFlags(prompt=["a fox"], output=Path(folder)).check()


def test_prompts_of_a_file(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    text = "a fox\n# two of them\n\na house\na fox\n"
    file.write_text(text, encoding="utf-8-sig")  # with the mark that some editors begin a file with
    bench("--prompts", file, "--strategy", "exact")
    assert {(call["prompt"], call["seed"]) for call in FakePipeline.opened[0].calls} == {("a fox", 0), ("a house", 1)}


def test_records_are_read_as_written_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    equal = replace(RECORD, psnr_db=math.inf, key=RECORD.key._replace(plan="patch=3"))
    file = RecordFile(path)
    file.add(RECORD)
    file.add(equal)
    with path.open("a") as opened:
        opened.write(RECORD.as_json()[:40])
    again = RecordFile(path)
    assert list(again.records.values()) == [RECORD, equal]
    again.add(replace(RECORD, seconds=5.0))
    assert RecordFile(path).records[RECORD.key].seconds == 5.0


def test_another_machine_is_measured_anew(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process there too; the same machine again is not."""
    for cores in (2, 16, 2):
        monkeypatch.setattr("patchpar.launch.devices.available_cores", lambda cores=cores: cores)
        assert bench("a fox", "--strategy", "exact").exit_code == 0
    assert [len({call["plan"] for call in pipe.calls}) for pipe in FakePipeline.opened] == [2, 2, 0]
    lines = map(json.loads, (tmp_path / "out/records.jsonl").read_text().splitlines())
    assert [line["machine"] for line in lines] == [f"cpu, cpu, cpu, cpu; {cores} cores" for cores in (2, 16)]


def test_the_hardware_of_gpus_is_part_of_the_machine_and_no_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is asked takes memory of a card for this process."""

    def refuse(kind: str) -> None:
        raise AssertionError(f"{kind} was asked")

    monkeypatch.setattr("patchpar.launch.accelerators.device_module", refuse)
    monkeypatch.setattr("patchpar.launch.devices.available_cores", lambda: 8)
    for found, wanted in ((("CPU", "0x10de:0x2330"), "; CPU, 0x10de:0x2330"), ((), "")):
        monkeypatch.setattr("patchpar.launch.devices.hardware", lambda found=found: found)
        assert machine_of(["cuda:0", "cuda:1"]) == f"cuda:0, cuda:1{wanted}; 8 cores"


def test_records_without_a_machine_are_measured_anew(bench: Any, tmp_path: Path) -> None:
    bench("a fox", "--strategy", "exact")
    path = tmp_path / "out/records.jsonl"
    old = json.loads(path.read_text())
    del old["machine"]
    path.write_text(json.dumps(old) + "\n")
    result = bench("a fox", "--strategy", "exact")
    assert "records.jsonl: 1 images of an earlier version are measured anew" in result.stderr
    assert FakePipeline.opened[-1].calls
    assert [set(json.loads(line)) - set(old) for line in path.read_text().splitlines()] == [set(), {"machine"}]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(PlanError, match=r"records\.jsonl, line 1, is no record.*name another folder"):
        RecordFile(path)


def test_equal_images_and_means() -> None:
    other = replace(RECORD, psnr_db=math.inf, seconds=1.0, key=RECORD.key._replace(prompt="a house"))
    (row,) = rows_of([RECORD, other])
    assert (row.psnr_db, row.worst_db, row.seconds, row.speedup) == (95.0, 40.0, 1.5, 2.0)
    (row,) = rows_of([other])
    assert "| equal | equal |" in markdown([row], {}, "cpu")


@pytest.mark.breadth
@pytest.mark.timeout(3600)
def test_rows_of_the_quality_page(run: Any, tmp_path: Path) -> None:
    """Real ranks, and all held-out captions of the page, which were generated four at a time.

    Not rows of `displaced` and `pcpp` with one exact step: corrected variances next to nothing enlarge rounding, which
    is another one in batches of four.
    """
    page = Path(__file__).parents[2] / "docs/figures/quality.md"
    names = ("fresh-edges", "fresh-edges:context=pooled", "fresh-edges:correction=none")
    wanted = {
        row.label: row.psnr_db
        for row in rows_of_page(page)
        if row.label in names
        and (row.setting.steps, row.setting.width, row.ranks, row.captions) == (8, 256, 4, 32)
        and row.setting.model == hash_of(embedded_model())
    }
    assert set(wanted) == set(names)
    words = ["--height", 256, "--width", 256, "--steps", 8, "--guidance-scale", 3.5, "--seed", 1000]
    words += [word for name in names for word in ("--strategy", name)]
    captions = [text for text, _ in held_out_captions(32)]
    result = run("bench", *captions, *words, "--devices", "cpu:4", "--deadline", 600, "--json", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    found = {row["plan"]: row["psnr_db"] for row in json.loads(result.stdout)["rows"]}
    for name, psnr in wanted.items():
        assert found[f"patch=4,strategy={name}"] == pytest.approx(psnr, abs=0.1)
