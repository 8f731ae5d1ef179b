"""Memory of stale keys of all guidance calls of a step is known in the first of them, and refused there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patchpar.errors import PlanError
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.shard.attention import stale
from patchpar.shard.denoiser import SharedDenoiser
from patchpar.shard.stale import stale_layout
from tests.tokens.piped import shared

PLAN = "patch=2,strategy=fresh-edges:extrapolated=false:correction=none"


def noted(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Bytes that are expected at each check, and those that each denoiser holds in the end."""
    expected, held = list[int](), list[int]()
    check, finish = stale.check_room, InstalledPlan.finish

    def checked(wanted: Any, *rest: Any) -> None:
        expected.append(wanted.total)
        check(wanted, *rest)

    def finished(self: InstalledPlan) -> None:
        for each in self.patched:
            if isinstance(each, SharedDenoiser) and each.history is not None:
                held.append(each.history.cache.num_bytes().total)
        finish(self)

    monkeypatch.setattr(stale, "check_room", checked)
    monkeypatch.setattr(InstalledPlan, "finish", finished)
    return expected, held


@pytest.mark.parametrize("name", ["flux", "wan", "sd"])
def test_the_first_call_counts_those_of_all_branches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pipeline with a call for each branch, or one for both."""
    expected, held = noted(monkeypatch)
    shared(name, PLAN, tmp_path, num_inference_steps=2)
    assert len(held) == 2
    assert max(expected) == pytest.approx(max(held), rel=0.15)


def test_without_guidance_there_is_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, held = noted(monkeypatch)
    shared("wan", PLAN, tmp_path, num_inference_steps=2, guidance_scale=1.0)
    assert max(expected) == pytest.approx(max(held), rel=0.15)


def test_each_rank_has_all_calls_of_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the branches on different ranks: all learn the form of each output in it."""
    expected, held = noted(monkeypatch)
    shared("wan", f"cfg=2,{PLAN}", tmp_path, num_inference_steps=2)
    assert len(held) == 4
    assert sorted(expected)[-4:] == pytest.approx(held, rel=0.15)


def test_what_does_not_fit_for_all_calls_is_refused_before_any_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, held = noted(monkeypatch)
    shared("wan", PLAN, tmp_path, num_inference_steps=2)
    of_all, calls = max(held), len(expected)
    monkeypatch.setattr(stale_layout, "free_memory", lambda: round(2 * 0.7 * of_all))
    expected.clear()
    with pytest.raises(PlanError, match=r"of keys and values of 2 guidance calls for the next step on each rank"):
        shared("wan", PLAN, tmp_path, num_inference_steps=2)
    assert len(expected) == calls // 2  # on each rank the first check
