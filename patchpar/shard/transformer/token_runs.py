"""The runs of tokens in one tensor: those of the latent, and those of text where they are split too.

whole        T T T T I I I I I I        text, then an image
rank 0       T T I I I
rank 1       T T I I I                  its rows of either run
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from patchpar.shard.transformer.token_plan import TokenRows
from patchpar.shard.transformer.token_ranges import TokenRanges


class TokenRun(NamedTuple):
    """A run of tokens in a tensor: its rows, and which rank has which of them."""

    rows: TokenRows
    ranges: TokenRanges


Runs = tuple[TokenRun, ...]


def runs_of(found: Iterable[tuple[TokenRows | None, TokenRanges | None]]) -> Runs:
    """Return the runs that a tensor has: those with rows in it, and split between ranks."""
    return tuple(TokenRun(rows, ranges) for rows, ranges in found if rows is not None and ranges is not None)


def cut_runs(x: Tensor, runs: Runs) -> Tensor:
    """Return our tokens of each run of a whole tensor of any shape, and the rows around them.

    A copy unless it is a contiguous view. Raises UnsupportedModel.
    """
    for rows, ranges in runs:
        x = rows.cut(x, ranges)
    return x
