"""Guidance branches on ranks that also share the weights: a rank without a call sends its shards all the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils._pytree import TreeSpec

from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.cfg.split import GuidanceSplit
from tests.breadth import first_of
from tests.tensors import noise
from tests.weights.programs import PROGRAMS

ON_RANKS = "tests.weights.programs"
CASES = [(name, *mesh) for name in PROGRAMS for mesh in ((2, 2), (3, 3), (2, 4))]


@pytest.mark.parametrize(("name", "cfg", "world"), first_of(CASES, *((name, 2, 2) for name in PROGRAMS), CASES[8]))
def test_same_bits_as_one_process(ranks: Any, name: str, cfg: int, world: int) -> None:
    for found in ranks.run(f"{ON_RANKS}:run", world, name, cfg, True):
        assert found["equal"] == [True, True]


def test_without_the_gathers_it_is_wrong(ranks: Any) -> None:
    for found in ranks.run(f"{ON_RANKS}:run", 2, "two_calls", 2, False):
        assert found["equal"] == [False, False]


def test_ranks_with_a_call_each_gather_once(ranks: Any) -> None:
    """Of 16 calls each rank makes those of the first step, and one in each of the other seven."""
    at_once = ranks.run(f"{ON_RANKS}:run", 2, "two_calls", 2, True)
    in_turn = ranks.run(f"{ON_RANKS}:run", 2, "used_between", 2, True)
    assert [found["calls"] for found in at_once] == [9, 9]
    assert all(joint["sent"] * 16 <= alone["sent"] * 10 for joint, alone in zip(at_once, in_turn, strict=True))


def test_calls_of_one_form_are_known_without_a_hash_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch 2.6 and 2.7 return of a tree of arguments has none."""
    monkeypatch.setattr(TreeSpec, "__hash__", None)
    stand_in: Any = SimpleNamespace()
    guidance, x = GuidanceSplit(stand_in, Axis("cfg"), StepClock()), noise(2, 4)
    guidance.rounds = stand_in
    assert len({guidance._form_of_call(x, (x,), {"frames": [number]}) for number in (1, 1, 2)}) == 2


def test_a_call_that_one_branch_refuses_ends_on_all_ranks_at_once(ranks: Any) -> None:
    """Others waited for its weights until the deadline."""
    found = ranks.run(f"{ON_RANKS}:fails_in_its_own_call", 2, "NotWatched", (0,))
    (own, message, _), (others, reason, seconds) = found
    assert (own, others) == ("NotWatched", "ExchangeError")
    assert message == "other arguments"
    assert "rank 0 has refused it in its own guidance branch: NotWatched: other arguments" in reason
    assert seconds < 5


def test_an_error_in_one_branch_is_not_looked_for_without_the_split(ranks: Any) -> None:
    """One rank cannot call the network alone, since it has a part of the weights."""
    for kind, message, _ in ranks.run(f"{ON_RANKS}:fails_in_its_own_call", 2, "RuntimeError", (0, 1)):
        assert kind == "UnsupportedModel"
        assert "(RuntimeError: other arguments), which other guidance ranks cannot follow: use weights=whole" in message


def test_lack_of_memory_in_one_branch_is_raised_as_such(ranks: Any) -> None:
    """It says nothing of the split: another one is not looked for."""
    for kind, message, _ in ranks.run(f"{ON_RANKS}:fails_in_its_own_call", 2, "MemoryError", (0, 1)):
        assert (kind, message) == ("MemoryError", "other arguments")


@pytest.mark.parametrize(("case", "says"), [("in_another_order", "in another order"), ("within_each_other", "within")])
def test_what_other_ranks_cannot_follow_is_refused(ranks: Any, case: str, says: str) -> None:
    for message in ranks.run(f"{ON_RANKS}:{case}", 2):
        assert says in message
        assert "use weights=whole, or cfg=1 and more ranks on axis patch" in message
