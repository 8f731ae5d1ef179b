"""What is sent of tokens that stay where they are: the same views in every step, and copies made anew."""

from __future__ import annotations

import pytest
import torch

from patchpar.plan.bands import Bands
from patchpar.plan.kv_selection import TokensAcross
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.token_messages import TokenMessages
from patchpar.shard.stale.stale_layout import StaleLayout
from patchpar.shard.stale.token_grid import LevelGrid
from patchpar.strategies import parse_strategy

TOKEN = (2, 1, 2, 4)


@pytest.mark.parametrize(("dim", "are_views"), [(-2, True), (-1, False)], ids=["rows", "columns"])
def test_every_step_sends_what_tokens_are_then(dim: int, are_views: bool) -> None:
    """Near rows follow each other in memory; near columns do not, and are gathered."""
    axis, grid = Axis("patch", 1, 3, (0, 1, 2)), LevelGrid(Bands((0, 8, 16, 24)), TokensAcross(6), dim)
    layout = StaleLayout(parse_strategy("pcpp").policy.context, axis, grid, TOKEN, 4, may_wait=True)
    messages = TokenMessages(layout)
    own, newest = torch.randn(grid.num_tokens(1), *TOKEN), torch.randn(layout.newest.total, *TOKEN)
    sent = []
    for _ in range(2):
        own.normal_()
        part = messages.part(own, newest)
        sent.append([x for _, tensors in part.outgoing for x in tensors])
        wanted = TokenMessages(layout).part(own, newest)
        for got, want in zip(sent[-1], (x for _, tensors in wanted.outgoing for x in tensors), strict=True):
            assert torch.equal(got, want)
    assert sent[0], "control: something is sent"
    assert [x is y for x, y in zip(*sent, strict=True)] == [are_views] * len(sent[0])
    (other, *_) = messages.part(own.clone(), newest).outgoing
    assert all(x is not y for x in other[1] for y in sent[1])
