"""Every pipeline of the zoo is exact under every plan, or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.coverage.page import with_pipelines
from benchmarks.coverage.pipelines.kept import KeptReports
from benchmarks.coverage.pipelines.report import Report, left_out, replaced, row_of, rows_of, section
from benchmarks.coverage.pipelines.trial import LIMIT, Outcome, judged, merged, outcomes_of
from benchmarks.coverage.pipelines.zoo import ZOO
from tests.breadth import first_of
from tests.conftest import POOL_SIZE

ALWAYS = ("PixArtSigmaPAGPipeline",)
"""In every run: one with three branches."""


@pytest.mark.parametrize("name", first_of(ZOO, *ALWAYS))
def test_no_pipeline_is_wrong_or_ends_in_an_error(ranks: Any, tmp_path: Path, name: str) -> None:
    """Exact under every plan, or refused in words."""
    entry = ZOO[name]
    found = ranks.run("benchmarks.coverage.pipelines.trial:examined", POOL_SIZE, name, entry.plans, str(tmp_path))
    assert not Report(name=name, guidance=entry.guidance, outcomes=outcomes_of(found, entry.plans)).failures


def test_what_is_wrong_is_seen() -> None:
    assert judged("patch=2", 1e-7, 0.2).status == "exact"
    assert judged("patch=2", 2 * LIMIT, 0.2).status == "wrong"
    assert judged("patch=2", 1e-7, 1e-7).status == "wrong"
    assert judged("patch=2", float("nan"), 0.2).status == "wrong"
    exact, refused = Outcome(plan="cfg=2", status="exact", error=1e-7), Outcome(plan="cfg=2", status="refused")
    assert merged([exact, refused]).status == "refused"
    assert merged([exact, judged("cfg=2", 0.4, None)]).status == "wrong"


def test_what_is_kept_is_not_tried_again(tmp_path: Path) -> None:
    outcome = Outcome(plan="patch=2", status="exact", error=2e-7, control=0.3)
    report = Report(name="SomePipeline", guidance="one call", outcomes=(outcome,))
    kept = KeptReports(tmp_path / "reports")
    assert kept.read("SomePipeline") is None
    assert kept.read(kept.write(report).name) == report
    assert KeptReports(None).write(report) == report
    assert KeptReports(None).read("SomePipeline") is None


def test_the_section_reads_back() -> None:
    outcome = Outcome(plan="patch=2", status="exact", error=2e-7, control=0.3)
    report = Report(name="SomePipeline", guidance="one call", outcomes=(outcome,))
    page = replaced("# Coverage\n", section([report], left_out()))
    assert rows_of(page) == [row_of(report)]
    assert replaced(page, section([report], left_out())) == page
    assert row_of(report).patch_2 == "1e-6"
    assert with_pipelines("# Coverage\n\nwritten anew\n", page) == page.replace(
        "# Coverage\n", "# Coverage\n\nwritten anew\n"
    )
    assert with_pipelines(page, "# Coverage\n") == page
