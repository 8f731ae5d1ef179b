"""While it is in bands a denoiser keeps its keys and types; taken out of them, it is what it was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.breadth import first_of

ON_RANKS = "tests.exact.on_ranks"


@pytest.mark.parametrize("name", first_of(["sdxl", "svd", "motion", "asymmetric"], "sdxl"))
def test_restore_leaves_no_trace(ranks: Any, name: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:restored", 2, name):
        assert all(found.values()), found


def test_weights_can_be_loaded_meanwhile(ranks: Any) -> None:
    assert max(ranks.run(f"{ON_RANKS}:loaded_meanwhile", 2)) <= 1e-5
