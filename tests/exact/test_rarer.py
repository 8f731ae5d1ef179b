"""What rarer pipelines around UNets return on two and three ranks: what they return alone, within rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import tiny

LIMIT, CONTROL = 1e-5, 1e-2


@pytest.mark.parametrize("name", tiny.RARER)
def test_what_is_drawn(ranks: Any, tmp_path: Path, name: str) -> None:
    *split, alone = ranks.run("tests.exact.rarer:errors", 4, name, ["patch=2", "patch=3"], str(tmp_path))[0]
    assert max(split) <= LIMIT, split
    assert alone >= CONTROL, alone
