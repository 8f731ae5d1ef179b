"""What the process takes for an exchange in a forecast of eager steps is what it was measured to take: docs/figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from patchpar.plan.replay.price import ASSUMED

COUNTS = json.loads((Path(__file__).parents[2] / "docs" / "figures" / "gpu-counts.json").read_text())
BEGINNINGS = {"sdxl": "SDXL", "flux": "FLUX"}


def section(beginning: str) -> list[dict[str, Any]]:
    (found,) = (each for each in COUNTS if each["heading"].startswith(beginning))
    rows: list[dict[str, Any]] = found["tables"][0]
    return rows


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def launches(model: str, strategy: str) -> float:
    """Of a steady step: the last row of a strategy."""
    rows = [row for row in section(BEGINNINGS[model]) if row["strategy"] == strategy]
    return number(rows[-1]["launches"])


def seconds_of_an_exchange(row: dict[str, Any]) -> float:
    """What an exchange adds, less what a plain step of the same process takes for the launches that it adds."""
    plain, exchanges = launches(row["model"], "plain"), number(row["exchanges"])
    added = launches(row["model"], row["strategy"]) - plain
    of_launches = added * 1e-3 * number(row["plain, ms"]) / plain
    return 1e-6 * number(row["added by each, µs"]) - of_launches / exchanges


def test_an_exchange_takes_what_it_was_measured_to_add() -> None:
    """Nothing but the beginning of a collective would be a sixth of it."""
    found = [seconds_of_an_exchange(row) for row in section("Time of the process")]
    assert len(found) >= 10
    assert ASSUMED.message == pytest.approx(statistics.median(found), rel=0.2)


@pytest.mark.parametrize("row", section("Time of the process"), ids=lambda row: f"{row['model']} {row['strategy']}")
def test_an_eager_step_of_several_ranks_waits_for_the_process_as_measured(row: dict[str, Any]) -> None:
    """Of the ratio to a plain step; with the beginning of a collective alone most would be far too short."""
    plain, split = (launches(row["model"], each) for each in ("plain", row["strategy"]))
    launch = 1e-3 * number(row["plain, ms"]) / plain
    predicted = (split * launch + number(row["exchanges"]) * ASSUMED.message) / (plain * launch)
    assert predicted == pytest.approx(number(row["of plain"]), rel=0.2)
