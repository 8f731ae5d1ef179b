"""The result of a search is kept: the same call on the same machine is not searched, priced or replayed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchpar.errors import PlanError
from patchpar.pipeline.planner import kept_searches
from patchpar.pipeline.planner.image_ranks import ImageRanks
from patchpar.pipeline.planner.kept_searches import KeptSearch, searched
from patchpar.pipeline.planner.kept_tapes import CallFacts
from patchpar.pipeline.planner.search import PlanSearchResult, search
from patchpar.pipeline.planner.simulate import Simulator
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.exact import ExactPatch
from tests.planner.test_kept_tapes import ranks_of


def simulator(
    folder: Path, machine: str = "2xRTX4090", call: dict[str, Any] | None = None, **options: Any
) -> Simulator:
    """Of a model in which plan cfg=2 cannot be."""

    def ranks(plan: Plan, steps: int) -> ImageRanks:
        if plan.cfg > 1:
            raise PlanError("no guidance")
        return ranks_of(plan)

    fresh = options.pop("fresh", False)
    found = Simulator("embedded", machine, options, call or {"height": 64}, VerificationCache(folder), fresh=fresh)
    found.__dict__["_model"] = SimpleNamespace(call=CallFacts(branches=2, steps=4), ranks=ranks)
    return found


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The machines that were searched, not those whose result was kept."""
    machines: list[str] = []

    def counted(machine: Any, *args: Any, **options: Any) -> PlanSearchResult:
        machines.append(str(machine))
        return search(machine, *args, **options)

    monkeypatch.setattr(kept_searches, "search", counted)
    return machines


def test_a_kept_result_is_that_of_the_search(tmp_path: Path, searches: list[str]) -> None:
    """All of it but the replays, and the kernels that the search itself needs."""
    found, again = (searched(simulator(tmp_path), 2, "exact") for _ in range(2))
    assert len(searches) == 1
    assert KeptSearch.of(again) == KeptSearch.of(found)
    assert again.as_dict() == found.as_dict()
    assert again.refused == {"cfg=2": "no guidance"}
    assert found.ranked[0].replayed is not None
    assert again.best.step.seconds == found.best.step.seconds > 0
    assert again.best.largest_memory == found.best.largest_memory


def test_what_a_result_depends_on_is_searched_anew(tmp_path: Path, searches: list[str]) -> None:
    searched(simulator(tmp_path), 2, "exact")
    others: list[Callable[[], PlanSearchResult]] = [
        lambda: searched(simulator(tmp_path, "2xH100"), 2, "exact"),
        lambda: searched(simulator(tmp_path, call={"height": 128}), 2, "exact"),
        lambda: searched(simulator(tmp_path, torch_dtype="float16"), 2, "exact"),
        lambda: searched(simulator(tmp_path, graphs=False), 2, "exact"),
        lambda: searched(simulator(tmp_path), 1, "exact"),
        lambda: searched(simulator(tmp_path), 2, ExactPatch(ulysses=2)),
        lambda: searched(simulator(tmp_path), 2, "exact", in_order=True),
        lambda: searched(simulator(tmp_path, fresh=True), 2, "exact"),
    ]
    for number, other in enumerate(others, start=2):
        other()
        assert len(searches) == number


def test_a_machine_whose_rates_are_others_is_searched_anew(tmp_path: Path, searches: list[str]) -> None:
    """Of the same name: a measured one is scaled by what calls take."""
    machine = Machine.parse("2xRTX4090")
    slower = replace(machine, device=replace(machine.device, matmul_fraction=machine.device.matmul_fraction / 2))
    assert str(slower) == str(machine)
    times = []
    for each in (machine, slower, slower):
        found = simulator(tmp_path)
        found.machine = each
        times.append(searched(found, 2, "exact").best.step.seconds)
    assert len(searches) == 2
    assert times[0] < times[1] == times[2]


def test_a_broken_file_is_searched_anew(tmp_path: Path, searches: list[str]) -> None:
    found = searched(simulator(tmp_path), 2, "exact")
    (file,) = (each for each in tmp_path.iterdir() if '"search"' in each.read_text())
    for old, new in (('"plan": "single"', '"plan": "singular"'), ('"calls": 1', '"calls": "1"'), ("{", "[")):
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        before = len(searches)
        assert searched(simulator(tmp_path), 2, "exact").as_dict() == found.as_dict()
        assert len(searches) == before + 1


def test_a_result_that_fits_no_device_is_refused_again(tmp_path: Path, searches: list[str]) -> None:
    for _ in range(2):
        each = simulator(tmp_path)
        each.machine = replace(each.machine, device=replace(each.machine.device, memory=1))  # type: ignore[arg-type]
        found = searched(each, 2, "exact")
        with pytest.raises(PlanError, match="no plan fits"):
            found.best  # noqa: B018
    assert len(searches) == 1
