"""The tests' own worker pool: functions run on as many ranks as asked, and talk to each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patchpar.comm.collectives import AllGather
from tests.ranks import PoolRank


def gathered(this: PoolRank, scale: float) -> list[float]:
    axis = this.mesh(patch=this.world)["patch"]
    own = torch.tensor([scale * this.rank])
    return [float(x) for x in AllGather(this.comm(), axis, "test", "here").same(own)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("through", ["auto", "torch"])
def test_the_first_ranks_take_part(ranks: Any, world: int, through: str) -> None:
    expected = [10.0 * rank for rank in range(world)]
    assert ranks.run("tests.test_ranks:gathered", world, 10.0, through=through) == [expected] * world


def test_more_ranks_than_there_are(ranks: Any) -> None:
    with pytest.raises(ValueError, match="1 to 4"):
        ranks.run("tests.test_ranks:gathered", 5, 1.0)
