"""The pipelines of docs/coverage.md: all of them, none wrong, and as many exact as the project stands for.

The page names the diffusers that it is of. With another one, what it says of the classes that both have is looked at.
"""

from __future__ import annotations

import pytest

from benchmarks.coverage.page import PAGE, read, versions
from benchmarks.coverage.pipelines.report import LEFT_OUT_HEADER, PLANS, Row, left_out, rows_of
from benchmarks.coverage.pipelines.trial import LIMIT, SEEN
from benchmarks.coverage.pipelines.zoo import ZOO
from benchmarks.coverage.tables import cells_under

LEAST_EXACT = {"patch=2": 0.90, "cfg": 0.97}
"""Share of pipelines, for guidance of those that have any."""


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for row in rows_of(PAGE.read_text()) if row.name in ZOO]


def cells(row: Row) -> dict[str, str]:
    return dict(zip(PLANS, (row.patch_2, row.patch_3, row.cfg, row.data), strict=True))


def test_every_class_is_there(rows: list[Row]) -> None:
    page = PAGE.read_text()
    reported = dict(cells_under(page, LEFT_OUT_HEADER))
    here, there = {*ZOO, *left_out()}, {row.name for row in rows_of(page)} | set(reported)
    if read(page).diffusers == versions()["diffusers"]:
        assert here == there
        assert set(left_out().values()).isdisjoint({"no small pipeline yet"})
    assert [(row.name, row.guidance) for row in rows] == [(each, ZOO[each].guidance) for each in ZOO if each in there]
    not_tried = {name: why for name, why in left_out().items() if name in there}
    assert {name: reported.get(name) for name in not_tried} == not_tried


def test_every_plan_is_exact_or_refused_in_words(rows: list[Row]) -> None:
    for row in rows:
        for plan, cell in cells(row).items():
            is_exact = cell == "equal" or (cell.startswith("1e-") and float(cell) <= LIMIT)
            has_no_batch = plan == "data=2" and cell == "-" and not ZOO[row.name].prompts
            has_none = plan == "cfg" and row.guidance == "none"
            assert is_exact or has_no_batch or (cell == "refused" and (has_none or plan in row.note)), row
        assert row.without == "-" or float(row.without) >= SEEN, row


@pytest.mark.parametrize(("plan", "least"), LEAST_EXACT.items())
def test_most_are_exact(rows: list[Row], plan: str, least: float) -> None:
    tried = [cells(row)[plan] for row in rows if plan != "cfg" or row.guidance != "none"]
    assert sum(cell != "refused" for cell in tried) >= least * len(tried)
