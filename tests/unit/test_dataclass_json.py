"""Dataclasses out of JSON: what was written comes back, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from patchpar.plan.dataclass_json import decoded


@dataclass(frozen=True)
class Inner:
    size: int
    rate: float = 1.0


@dataclass(frozen=True)
class Outer:
    name: str
    parts: tuple[Inner, ...]
    by_number: Mapping[int, Inner]
    pair: tuple[str, int]
    names: frozenset[tuple[str, bool]]
    free: Any
    maybe: Inner | None = None


VALUE = Outer("a", (Inner(1), Inner(2, 0.5)), {3: Inner(4)}, ("b", 5), frozenset({("c", True)}), [{"d": None}])
RAW = json.loads(json.dumps(asdict(VALUE), default=sorted))


def test_what_was_written_comes_back() -> None:
    assert decoded(Outer, RAW) == VALUE
    assert decoded(Outer, {**RAW, "maybe": {"size": 1, "rate": 2}}).maybe == Inner(1, 2.0)
    assert decoded(Outer, {name: item for name, item in RAW.items() if name != "maybe"}) == VALUE


@pytest.mark.parametrize(
    "changed",
    [
        {"name": 1},
        {"name": None},
        {"parts": {}},
        {"parts": [1]},
        {"parts": [{"size": True}]},
        {"parts": [{"size": 1.0}]},
        {"parts": [{"size": 1, "rate": "fast"}]},
        {"parts": [{"size": 1, "rate": False}]},
        {"parts": [{"size": 1, "rate": 10**400}]},
        {"parts": [{"size": 1, "colour": "red"}]},
        {"parts": [{}]},
        {"by_number": {"three": {"size": 1}}},
        {"by_number": []},
        {"pair": ["b"]},
        {"pair": ["b", 5, 6]},
        {"names": [["c", 1]]},
        {"maybe": 0},
        {"other": 1},
    ],
    ids=str,
)
def test_what_is_none_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        decoded(Outer, {**RAW, **changed})


@pytest.mark.parametrize("raw", [None, [], 1, "Outer"])
def test_what_is_no_object_is_refused(raw: Any) -> None:
    with pytest.raises(TypeError, match="where a dict was written"):
        decoded(Outer, raw)
