"""Adapters work in bands as they do whole."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.breadth import first_of

ADAPTERS = "tests.exact.adapters"


@pytest.mark.breadth
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft, which the extra dev installs")
@pytest.mark.parametrize("name", first_of(["sd", "sdxl"], "sdxl"))
def test_lora_of_peft(ranks: Any, name: str) -> None:
    for found in ranks.run(f"{ADAPTERS}:with_peft", 2, name):
        assert found["adapted"] <= 1e-5, found
        assert found["scaled"] <= 1e-5, found
        assert found["disabled"] <= 1e-5, found
        assert found["weight"] >= 1e-2, found


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft, which the extra dev installs")
def test_adapters_in_turn_are_known_again(ranks: Any) -> None:
    """Exchange points are found once for each of three selections, not for each of six calls."""
    for found in ranks.run(f"{ADAPTERS}:in_turn", 2, "sdxl"):
        assert max(found["errors"]) <= 1e-5, found
        assert found["searches"] == 3, found


@pytest.mark.breadth
@pytest.mark.parametrize("name", first_of(["sdxl", "asymmetric"], "asymmetric"))
def test_lora_by_hand(ranks: Any, name: str) -> None:
    for found in ranks.run(f"{ADAPTERS}:by_hand", 2, name):
        assert found["adapted"] <= 1e-5, found
        assert found["weight"] >= 1e-2, found
