"""docs/coverage.md says what is so: a sample is examined again, and the page is one that the script has written."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from benchmarks.coverage import own_lines
from benchmarks.coverage.modes import FIRST, Mode, modes
from benchmarks.coverage.own_lines import PACKAGE, lines_naming, words_of
from benchmarks.coverage.page import PAGE, Page, changes, read, versions, written
from benchmarks.coverage.report import RANKS, Report, Row, examine, row_of
from benchmarks.coverage.subjects import Subject, installed, left_out, subjects
from benchmarks.coverage.trial import LIMIT, SEEN, Found, Result, Trial, distance
from patchpar.shard.transformer.token_plan import TokenPlan
from tests.breadth import first_of

SAMPLE = {
    "FluxTransformer2DModel": "text first, blocks of two kinds",
    "HiDreamImageTransformer2DModel": "one of its calls is with other arguments",
    "Lumina2Transformer2DModel": "a mask, samples of different lengths, grouped heads",
    "PixArtTransformer2DModel": "text in cross attention alone",
    "SanaTransformer2DModel": "sums over tokens and convolutions",
    "SanaVideoTransformer3DModel": "the same, over frames too",
    "SanaWMTransformer3DModel": "refused",
    "UNet2DModel": "bands",
    "WanAnimateTransformer3DModel": "some blocks whole on every rank",
    "WanTransformer3DModel": "video",
}
QUICK = ("PixArtTransformer2DModel",)
LEAST_SPLIT = 50


@pytest.fixture(scope="module")
def page() -> Page:
    return read(PAGE.read_text())


def of_this_diffusers(page: Page) -> Page:
    """What the page says holds for the diffusers it names."""
    if page.diffusers != versions()["diffusers"]:
        pytest.skip(of_another_diffusers(page))
    return page


def of_another_diffusers(page: Page) -> str:
    return (
        f"docs/coverage.md is of diffusers {page.diffusers}, and this is {versions()['diffusers']} "
        f"({changes(page, installed())}): `make coverage` writes it anew"
    )


def sampled(name: str) -> Subject:
    """Of several configurations the last."""
    return [each for each in subjects() if each.name == name][-1]


@pytest.mark.breadth
@pytest.mark.parametrize("name", first_of(SAMPLE, *QUICK))
def test_what_the_page_says_is_found_again(page: Page, name: str) -> None:
    report = examine(sampled(name), RANKS)
    assert not report.failures
    row = row_of(report)
    (reported,) = [each for each in of_this_diffusers(page).rows if (each.name, each.family) == (row.name, row.family)]
    assert (row.split, row.modes, row.note) == (reported.split, reported.modes, reported.note)


def test_the_page_has_every_class(page: Page) -> None:
    """Of another diffusers, every class that is in both; the reason of the skip names the others."""
    everything = [(each.name, each.family) for each in subjects()]
    reported = [(row.name, row.family) for row in page.rows]
    if page.diffusers != versions()["diffusers"]:
        in_both = {name for name, _ in reported} & installed()
        assert [each for each in reported if each[0] in in_both] == [each for each in everything if each[0] in in_both]
        pytest.skip(of_another_diffusers(page))
    assert reported == everything
    assert dict(page.left_out) == left_out({name for name, _ in everything})


def test_another_diffusers_has_classes_that_are_new_or_gone(page: Page) -> None:
    known = {row.name for row in page.rows} | set(page.left_out)
    assert changes(page, known) == "new: none; gone: none"
    assert changes(page, known - {"UNet2DModel"} | {"OtherUNet"}) == "new: OtherUNet; gone: UNet2DModel"


def test_the_page_is_whole(page: Page) -> None:
    """All that was tried is there, with figures within the limits."""
    assert len(page.rows) >= LEAST_SPLIT
    for row in page.rows:
        assert row.split in ("tokens", "tokens, partly", "bands", "refused", "failed"), row
        if row.split in ("refused", "failed"):
            assert row.note, row
            continue
        right, tried = map(int, row.modes.split(" of "))
        assert tried == sum(mode.exchange == "on" for count in RANKS for mode in modes(count)), row
        assert 0 < right <= tried
        assert tried - right == len(re.findall(r"(?<!without exchange) on \d ranks", row.note)), row
        errors = [error for error in (row.two_ranks, row.three_ranks, row.four_ranks) if error != "equal"]
        assert all(float(error) <= LIMIT for error in errors if error != "-"), row
        assert float(row.without) >= SEEN, row


def test_most_transformers_are_split(page: Page) -> None:
    assert sum(row.split.startswith("tokens") for row in page.rows) >= LEAST_SPLIT


def _result(worst: float | None, *, exchange: str = "on", best: float | None = None, **reported: str) -> Result:
    mode = Mode(name="ring", strategy="exact:attention=ring", evaluations=(FIRST,), exchange=exchange)  # type: ignore[arg-type]
    return Result(mode=mode, ranks=2, worst=worst, best=best, **reported)


def _report(*results: Result, **changes: object) -> Report:
    found = Found(known=object())
    report = {"name": "Some2DModel", "family": "some", "found": found, "results": results, "restored": True}
    return Report(**(report | {"gathered": 0, "own_lines": ()} | changes))  # type: ignore[arg-type]


def test_the_page_reads_back() -> None:
    reports = [_report(_result(3e-7), _result(None, exchange="off", best=0.25), _result(None, refusal="a | b"))]
    text = written(reports, {"OtherModel": "no reason"})
    expected = Row("Some2DModel", "some", "bands", "1 of 2", "1e-6", "-", "-", "0.2", "no ring on 2 ranks: a \\| b")
    assert read(text) == Page(**versions(), rows=(expected,), left_out={"OtherModel": "no reason"})
    with pytest.raises(ValueError, match="which versions"):
        read("# Coverage")
    with pytest.raises(ValueError, match="8 cells where there should be 9"):
        read(text.replace("| 1 of 2 ", ""))


@pytest.mark.parametrize(
    ("report", "reported"),
    [
        (_report(_result(2e-5, failure="off by 2.0e-05")), "ring on 2 ranks: off by 2.0e-05"),
        (_report(restored=False), "the model is not as it was before"),
        (_report(found=Found(failure="RuntimeError: no")), "RuntimeError: no"),
    ],
)
def test_what_is_wrong_fails(report: Report, reported: str) -> None:
    row = row_of(report)
    assert row.split == "failed"
    assert row.note == reported


def test_what_is_whole_is_told() -> None:
    plan = TokenPlan(denoiser="Some", latent="x", blocks=(), whole={"a, 3 x Block": "no", "b, 1 x Block": "no"})
    assert row_of(_report(found=Found(known=plan))).note == "every rank has all of Block: no"
    assert row_of(_report(found=Found(known=plan))).split == "tokens, partly"


def test_a_refusal_gives_each_reason_once() -> None:
    reason = "XModel cannot be split by tokens (a, 3 x Block: it cannot; b.c, 1 x Other: it cannot): use plan cfg=2"
    assert row_of(_report(found=Found(refusal=reason))).note == "Block, Other: it cannot"


@pytest.fixture(scope="module")
def trial() -> Trial:
    return Trial(sampled("PixArtTransformer2DModel"), 2)


def test_the_trial_sees_a_wrong_split(trial: Trial) -> None:
    """Modes that claim what is not so: exactness without exchange, staleness with it, a control that is none."""
    known = trial.first_use().known
    alone = Mode(name="alone", strategy="exact", evaluations=(FIRST,), exact=(0,), exchange="off")
    assert re.match(r"off by \d", trial.run(alone, 2, known).failure)
    fresh = Mode(name="fresh", strategy="exact", evaluations=(FIRST,), stale=(0,))
    assert "old keys are not what it uses" in trial.run(fresh, 2, known).failure
    assert trial.is_restored()


def test_the_trial_sees_an_error_and_a_model_left_changed(trial: Trial) -> None:
    unknown = Mode(name="unknown", strategy="exact:attention=unknown", evaluations=(FIRST,))
    assert trial.run(unknown, 2, None).failure.startswith("PlanError: ")
    weight = next(trial.models[1].parameters())
    weight.mul_(2)
    assert not trial.is_restored()
    weight.div_(2)
    assert trial.is_restored()


def test_distance() -> None:
    ones = torch.ones(4)
    assert distance([ones], [ones]) == 0
    assert distance([ones, 1.1 * ones], [ones, ones]) == pytest.approx(0.1)
    assert distance([ones / 0], [ones]) == math.inf
    assert distance([ones[:2]], [ones]) == math.inf


def test_lines_that_know_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = '"""Docs of AModel."""\nimport AModel\nx = b.AModel if "AModelPipeline" else AModel  # AModel'
    assert [line for line, word in words_of(source) if "AModel" in word] == [2, 3, 3, 3]
    assert PACKAGE / "shard" in PACKAGE.iterdir()
    for file in ("shard/own.py", "models/streaming/network.py", "stream/adapter.py"):  # of which streams are left out
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(source)
    monkeypatch.setattr(own_lines, "PACKAGE", tmp_path)
    monkeypatch.setattr(own_lines, "_words", own_lines._words.__wrapped__)  # those of the whole package are not kept
    found = lines_naming(["AModel", "NoSuchModel"])
    assert found == {"AModel": ["shard/own.py:2", *["shard/own.py:3"] * 3], "NoSuchModel": []}
