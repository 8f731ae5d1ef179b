"""What the ranks of the tests of laws run."""

from __future__ import annotations

from typing import Any

from benchmarks.weights.law_ranks import LawRank
from tests.ranks import PoolRank


def run(this: PoolRank, part: str, case: Any) -> Any:
    """What a rank of the benchmark measures."""
    return getattr(LawRank.over(this.transport), part)(case)
