"""Predictions of a step's time: what limits it, from counts and published rates."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.denoisers import NAMES, Denoiser
from benchmarks.gpu.predict import ASSUMED, COMPARISON, DEVICES, LEFT_OUT, STRATEGIES, predicted, stale_kinds
from benchmarks.gpu.recorder import CallCounts, Work
from benchmarks.gpu.strategies import FakeRank
from tests.gpu.short_models import WORLD

H100 = DEVICES[0]
FIGURES = Path(__file__).parents[2] / "docs/figures"
PAGE = FIGURES / "gpu-predict.md"
WRITE_IT = "write it again: python -m benchmarks.gpu.predict --write docs/figures/gpu-predict.md"
MIB = 2**20
SECOND_OF_LINK = int(H100.link * ASSUMED.link_fraction)
COUNTS = CallCounts(
    launches=Counter(mm=1000),
    operations=Counter(all_gather=100),
    work=Counter({Work(int(H100.flops * ASSUMED.matmul_fraction), 0): 1, Work(0, 1): 1000}),
    booked=Counter(kv=3 * SECOND_OF_LINK, halo=SECOND_OF_LINK),
    rounds=Counter({"kv": 10, "halo+moments": 10}),
)


def test_an_exact_step_waits_for_every_message() -> None:
    found = predicted(COUNTS, H100)
    assert found.host == pytest.approx(1000 * ASSUMED.launch + 100 * ASSUMED.operation)
    assert found.kernels == pytest.approx(1 + 1000 * ASSUMED.shortest_kernel)
    assert found.messages == pytest.approx(4 + 20 * ASSUMED.message)
    assert found.step == found.replayed == found.kernels + found.messages


def test_a_stale_step_waits_for_fresh_messages_and_is_no_shorter_than_all_of_them_take() -> None:
    found = predicted(COUNTS, H100, {"kv"})
    assert found.messages == pytest.approx(1 + 10 * ASSUMED.message)
    assert found.step == found.replayed == found.link == pytest.approx(4)
    faster = predicted(COUNTS, replace(H100, link=100 * H100.link), {"kv"})
    assert faster.step == faster.kernels + faster.messages


def test_a_step_is_no_shorter_than_its_launches_take_unless_they_are_replayed() -> None:
    counts = CallCounts(launches=Counter(mul=10), work=Counter({Work(0, 1): 10}))
    found = predicted(counts, H100)
    assert found.step == pytest.approx(10 * ASSUMED.launch)
    assert found.replayed == pytest.approx(10 * ASSUMED.shortest_kernel)


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        ("exact", set()),
        ("fresh-edges", {"kv", "bucket"}),
        ("displaced", {"kv", "bucket", "halo", "moments"}),
    ],
)
def test_what_arrives_a_step_later(strategy: str, kinds: set[str]) -> None:
    assert stale_kinds(strategy) == kinds


def test_four_ranks_of_a_network_have_a_quarter_of_its_attention(rank: FakeRank, models: dict[str, Denoiser]) -> None:
    plain, split = rank.plain(models["flux"]), rank.steps(models["flux"], "exact")["exact"]

    def longest(counts: CallCounts) -> Work:
        return max(counts.work, key=lambda work: work.flops)

    assert predicted(split, H100).kernels < predicted(plain, H100).kernels / 2
    assert longest(split).flops < longest(plain).flops / 2


def test_the_page_has_the_assumptions_of_its_figures() -> None:
    text = PAGE.read_text()
    missing = [each for each in (*ASSUMED.lines(), LEFT_OUT, COMPARISON) if each not in text]
    assert not missing, WRITE_IT


def section_of(page: str, model: str) -> list[list[dict[str, str]]]:
    """The tables of a model on a page."""
    sections = json.loads((FIGURES / page).with_suffix(".json").read_text())
    (found,) = (each["tables"] for each in sections if each["heading"].startswith(model))
    return list(found)


def number(cell: Any) -> float:
    return float(str(cell).replace(",", ""))


@pytest.mark.parametrize("model", ["SDXL", "FLUX"])
def test_the_page_is_of_the_counts_as_they_are(model: str) -> None:
    """Of four ranks, which are those of the page of counts: what the process takes, and all bytes on the link."""
    counted = {(row["strategy"], row["step"]): row for row in section_of("gpu-counts", model)[0]}
    *tables, _ = section_of("gpu-predict", model)  # the last one is beside what was measured
    for device, table in zip(DEVICES, tables, strict=True):
        rows = {row["strategy"].strip("`"): row for row in table if row["GPUs"] in ("1", str(WORLD))}
        assert rows.keys() == {"plain", *STRATEGIES}
        for strategy, row in rows.items():
            kind = "" if strategy == "plain" else "stale" if stale_kinds(strategy) else "exact"
            counts = counted[strategy if strategy == "plain" else f"`{strategy}`", kind]
            process = number(counts["launches"]) * ASSUMED.launch + number(counts["operations"]) * ASSUMED.operation
            link = number(counts["MiB sent"]) * MIB / (device.link * ASSUMED.link_fraction)
            assert number(row["process"]) == pytest.approx(1e3 * process, abs=0.06), f"{strategy}: {WRITE_IT}"
            assert number(row["link"]) == pytest.approx(1e3 * link, rel=0.01, abs=0.06), f"{strategy}: {WRITE_IT}"


@pytest.mark.parametrize("model", ["sdxl", "flux"])
def test_what_was_measured_stands_beside_it(model: str) -> None:
    *_, found = section_of("gpu-predict", NAMES[model])
    own = {each["heading"]: each for each in json.loads((FIGURES / "gpu.json").read_text())}["A rank's own work"]
    graphs = [row for (table,) in [own["tables"]] for row in table if row["step"].endswith("graph")]
    measured = {row["strategy"]: number(row["ms"]) for row in graphs if row["model"] == model}
    assert {row["strategy"] for row in found} == {"plain", *(f"`{strategy}`" for strategy in STRATEGIES)}
    for row in found:
        assert number(row["measured, ms"]) == pytest.approx(measured[row["strategy"]], abs=0.06), WRITE_IT
        ratio = number(row["measured, ms"]) / number(row["predicted kernels, ms"])
        assert number(row["of predicted"].rstrip("x")) == pytest.approx(ratio, rel=0.02)
