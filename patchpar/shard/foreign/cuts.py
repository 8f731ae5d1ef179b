"""Which positions of a tensor's dim are this rank's, by the sizes of that dim in the plain and in the split call."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import permutations

import torch

from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.transformer.token_ranges import TokenRanges

Cut = Callable[[int, int], Sequence[int] | None]
"""Returns which of so many positions ours are, of which there are so many; None for sizes that it does not know."""


def band_cuts(patch: LocalPatch) -> list[Cut]:
    """Return how rows, or the tokens of a map, are divided into bands."""
    return [partial(_of_band, patch)]


def _of_band(patch: LocalPatch, size: int, own: int) -> Sequence[int] | None:
    rank = patch.group_rank
    try:
        bands = patch.level(own)
        if bands.total == size:
            return range(bands.starts[rank], bands.starts[rank + 1])
    except UnsupportedModel:
        pass
    try:
        grid = patch.grid(own)
    except UnsupportedModel:
        return None
    if grid.total_tokens != size:
        return None
    if grid.dim == -2:
        return range(grid.start(rank), grid.start(rank + 1))
    columns = range(grid.bands.starts[rank], grid.bands.starts[rank + 1])
    return [row * grid.bands.total + column for row in range(size // grid.bands.total) for column in columns]


def token_cuts(ranges: Iterable[TokenRanges]) -> list[Cut]:
    """Return how tokens are divided: those of one run, of two in either order, or one beside tokens that all have."""
    runs = list(dict.fromkeys(ranges))
    return [partial(_of_runs, runs, last=last) for last in (True, False)]


def _of_runs(runs: Sequence[TokenRanges], size: int, own: int, *, last: bool) -> Sequence[int] | None:
    for run in runs:
        if (run.num_tokens, run.count) == (size, own):
            return _positions(run)
    pairs = list(permutations(runs if last else runs[::-1], 2))
    for one, other in pairs[: len(pairs) // 2 or 1]:
        if (one.num_tokens + other.num_tokens, one.count + other.count) == (size, own):
            return [*_positions(one), *(one.num_tokens + at for at in _positions(other))]
    for run in runs:
        rest = size - run.num_tokens
        if rest > 0 and rest == own - run.count:
            shared = range(rest) if last else range(run.num_tokens, size)
            mine = [at + rest if last else at for at in _positions(run)]
            return [*shared, *mine] if last else [*mine, *shared]
    return None


def _positions(run: TokenRanges) -> list[int]:
    found: list[int] = run.own(torch.arange(run.num_tokens), 0).tolist()
    return found


def branch_cuts(axis: Axis) -> list[Cut]:
    """Return how a batch of guidance branches is divided: in equal parts."""

    def cut(size: int, own: int) -> Sequence[int] | None:
        return range(axis.rank * own, (axis.rank + 1) * own) if size == own * axis.size else None

    return [cut]
