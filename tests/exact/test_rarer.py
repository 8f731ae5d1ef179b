"""What rarer pipelines around UNets return on two and three ranks: what they return alone, within rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.breadth import first_of

LIMIT, CONTROL = 1e-5, 1e-2
QUICK = ("if_text",)
"""A denoiser in pixels; benchmarks/coverage/pipelines goes over more pipelines."""


@pytest.mark.breadth
@pytest.mark.parametrize("name", first_of(tiny.RARER, *QUICK))
def test_what_is_generated(ranks: Any, tmp_path: Path, name: str) -> None:
    plans = ["patch=2", "patch=3"] + ["cfg=2,patch=2"] * name.endswith("ip_masks")
    *split, alone = ranks.run("tests.exact.rarer:errors", 4, name, plans, str(tmp_path))[0]
    assert max(split) <= LIMIT, split
    assert alone >= CONTROL, alone
