"""Two ways to generate an image beside each other: any plan, both sides named and kept, and either on the left."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from app.compare_tab import CompareTab
from app.high_res_tab import LargeTab
from app.history_panel import HistoryPanel
from app.image_parameters import read_parameters
from app.presets import preset_or_plan, presets_for
from app.state import AppState
from patchpar import PlanError

from .test_bad_input import OWNER, fields
from .test_history_panel import last_of

PAIR, DIFFERENCE, STATUS, TABLE = range(4)
PLAN, PLAIN = "patch=2,strategy=fresh-edges:bits=4", "One device"


def names_in(table: str) -> list[str]:
    return re.findall(r'<td data-name="">([^<]*)</td>', table)


def test_a_plan_stands_beside_a_preset_and_both_are_kept(state: AppState) -> None:
    outputs = last_of(CompareTab(state).run(OWNER, PLAN, PLAIN, *fields(seed=3)))
    assert outputs[PAIR]["label"] == f"Left: {PLAN}. Right: {PLAIN}."
    assert names_in(outputs[TABLE]) == [PLAN, PLAIN]
    pipe: Any = state.workers.image_pipeline()
    assert str(pipe.plans[0]) == PLAN
    names = state.history.names(OWNER)
    assert len(names) == 2
    assert [read_parameters(state.history.path(OWNER, name)).seed for name in names] == [3, 3]
    assert len(HistoryPanel(state).refresh(OWNER)[1]) == 2, "in the tab Image too"


def test_the_sides_change_without_another_run(state: AppState) -> None:
    tab = CompareTab(state)
    assert tab.reverse(OWNER, PLAN, PLAIN)[:2] == (PLAIN, PLAN)
    outputs = last_of(tab.run(OWNER, PLAN, PLAIN, *fields()))
    calls = len(state.workers.image_pipeline().calls)  # type: ignore[attr-defined]
    left, right = outputs[PAIR]["value"]
    one, other, pair, table = tab.reverse(OWNER, PLAN, PLAIN)
    assert (one, other) == (PLAIN, PLAN)
    assert [np.array_equal(*images) for images in zip(pair["value"], (right, left), strict=True)] == [True, True]
    assert not np.array_equal(left, right)
    assert pair["label"] == f"Left: {PLAIN}. Right: {PLAN}."
    assert names_in(table) == [PLAIN, PLAN]
    again = tab.reverse(OWNER, one, other)
    assert (again[:2], names_in(again[3])) == ((PLAN, PLAIN), [PLAN, PLAIN])
    assert tab.reverse(OWNER, "cfg=2", PLAIN)[2].get("value") is None, "another plan is chosen, whose image is not here"
    assert len(state.workers.image_pipeline().calls) == calls  # type: ignore[attr-defined]


def test_a_large_image_is_kept_as_well(state: AppState) -> None:
    last_of(LargeTab(state).generate(OWNER, "", False, *fields()))
    assert len(state.history.names(OWNER)) == 1


def test_a_plan_is_read_with_its_strategy() -> None:
    assert preset_or_plan("2 bands, exact", 2) in presets_for(2)
    assert str(preset_or_plan(" cfg=2 ", 2).plan(2)) == "cfg=2"
    assert str(preset_or_plan("patch=2, strategy=pcpp", 2).plan(2)) == "patch=2,strategy=pcpp"
    assert str(preset_or_plan("strategy=displaced:warmup_steps=2", 2).plan(2)).startswith("patch=2,strategy=displaced")


@pytest.mark.parametrize(
    ("text", "message"),
    [("By magic", "no preset"), ("", "no preset"), ("patch=3", "takes 3 devices"), ("rows=2", "unknown axis")],
)
def test_what_is_neither_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        preset_or_plan(text, 2)
