"""This rank's tokens in a tensor that a model takes for the whole: what is computed of them alone, and what gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.shard.transformer.local_tokens import LocalTokens, TokenSource, all_whole, local_tokens
from patchpar.shard.transformer.token_plan import TokenRows
from patchpar.shard.transformer.token_ranges import spread
from patchpar.shard.transformer.token_runs import TokenRun

TOKENS, TEXT, WIDTH = 7, 2, 6
RANGES = [spread(TOKENS, rank, 2) for rank in range(2)]
ROWS = TokenRows(1, TEXT, None)  # text first
WHOLE = torch.randn(2, TEXT + TOKENS, WIDTH)
VECTOR, OF_SAMPLES = torch.randn(WIDTH), torch.randn(2, 1, WIDTH)
LINEAR, NORM = nn.Linear(WIDTH, 4), nn.LayerNorm(WIDTH)
LINEAR.requires_grad_(False)
NORM.requires_grad_(False)


def split(x: Tensor, rank: int = 0) -> tuple[LocalTokens, list[Tensor]]:
    """A rank's tokens of x, and what has been gathered of them; other ranks' are taken from x."""
    gathered: list[Tensor] = []

    def gather(own: Tensor, source: TokenSource) -> Tensor:
        assert torch.equal(own, ROWS.cut(x, RANGES[rank]))
        gathered.append(own)
        return x.clone()

    source = TokenSource((TokenRun(ROWS, RANGES[rank]),), "a block", gather)
    return local_tokens(ROWS.cut(x, RANGES[rank]), source), gathered


PER_TOKEN: dict[str, Callable[[Any], Any]] = {
    "dtypes": lambda x: x.to(torch.float64).float().type_as(x).to(x.dtype).contiguous(),
    "elements": lambda x: F.gelu(F.silu(torch.exp(-x.abs()))).pow(2).sqrt(),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "a number": lambda x: (1 - 2 * x) / 3 + 4,
    "one vector": lambda x: x * VECTOR + VECTOR,
    "one for each sample": lambda x: OF_SAMPLES + x * (1 + OF_SAMPLES),
    "one for each token": lambda x: torch.mul(x, WHOLE) - WHOLE,
    "two of them": lambda x: x.float() * x + x,
    "layers": lambda x: LINEAR(NORM(x)),
    "root mean squares": lambda x: F.rms_norm(x, (WIDTH,)),
}
OF_ALL: dict[str, Callable[[Any], Any]] = {
    "a mean": lambda x: x.mean(1),
    "a part": lambda x: x[:, 1:],
    "rows as features": lambda x: F.layer_norm(x, (TEXT + TOKENS, WIDTH)),
    "a product of tokens": lambda x: x @ x.transpose(1, 2),
    "another layout": lambda x: x.reshape(2, -1, 3, 2),
    "many dims": lambda x: x + torch.ones(3, 1, 1, 1),
    "a limit for each": lambda x: torch.clamp(x, WHOLE),
    "in place": lambda x: x.add_(1),
    "to another tensor": lambda x: torch.stack([x, WHOLE]),
    "noise": lambda x: F.dropout(x, 0.0, training=True),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_computed_for_each_token(name: str, rank: int) -> None:
    x = torch.randn(2, TEXT + TOKENS, WIDTH)
    local, gathered = split(x, rank)
    found, want = PER_TOKEN[name](local), PER_TOKEN[name](x)
    assert isinstance(found, LocalTokens)
    assert not gathered
    assert (found.shape, found.dtype, found.ndim, found.size(1), len(found)) == (want.shape, want.dtype, 3, 9, 2)
    assert not gathered
    torch.testing.assert_close(found.own, ROWS.cut(want, RANGES[rank]))


@pytest.mark.parametrize("name", OF_ALL)
def test_gathered_once(name: str) -> None:
    x = torch.randn(2, TEXT + TOKENS, WIDTH)
    local, gathered = split(x)
    torch.testing.assert_close(OF_ALL[name](local), OF_ALL[name](x.clone()))
    assert len(gathered) == 1
    local.sum()
    assert len(gathered) == 1


def test_a_change_in_place_is_seen_by_later_readers() -> None:
    x = torch.randn(2, TEXT + TOKENS, WIDTH)
    local, _ = split(x)
    same: Tensor = local
    assert same.float() is local
    same += 1
    torch.testing.assert_close(local * 2, (x + 1) * 2)
    torch.testing.assert_close(all_whole({"a": [local]})["a"][0], x + 1)


def test_other_tokens_are_not_mixed_with_these() -> None:
    """Another block may split other tokens otherwise."""
    x = torch.randn(2, TEXT + TOKENS, WIDTH)
    local, gathered = split(x)
    other = local_tokens(local.own, TokenSource((TokenRun(ROWS, RANGES[1]),), "another", lambda own, source: x + 1))
    torch.testing.assert_close(local + other, x + x + 1)
    assert len(gathered) == 1
