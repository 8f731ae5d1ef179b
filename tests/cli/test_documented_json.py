"""What `--json` prints of a call is on the page of the command line, name by name."""

from __future__ import annotations

import re
from pathlib import Path

from patchpar.cli.convert import as_dict as converted
from patchpar.cli.tune import as_dict as tuned
from patchpar.models.streaming.convert import ConvertedModel
from patchpar.pipeline.planner.tune.tune import TuneResult
from patchpar.pipeline.rank_stats import RankStats, StepStats
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text().partition("\n## Output\n")[2]


def documented(begin: str) -> set[str]:
    """Names in the item of the list that begins so."""
    (item,) = re.findall(rf"^- {re.escape(begin)}(.*)$", PAGE, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", item)) - {"null"}


def test_of_a_call_and_its_ranks() -> None:
    step = StepStats(bytes_sent={}, bytes_received={}, seconds_waited={})
    rank = RankStats(rank=0, device="cpu", bytes_sent={}, bytes_received={}, seconds_waited={}, steps=(step,))
    call = Run(plan=Plan(), seconds=1.0, ranks=(rank,)).as_dict()
    assert {*call, "outputs", "trace"} == documented("`generate` and `upscale`:")
    assert {*call["ranks"][0]} == documented("each of `ranks`:")
    assert {*step.as_dict()} < documented("each of `ranks`:")


def test_of_a_checkpoint() -> None:
    found = ConvertedModel(
        folder=Path("folder"), family="wan", entry="", base=Path("base"), num_weights=1, num_merged=0, config=None
    )
    assert {*converted(found)} == documented("`convert`:")


def test_of_a_machine_that_was_busy() -> None:
    assert {*tuned(TuneResult(machine=None, kept_before=None), 1.0)} < documented("`tune`:")
