"""Cut a tensor into uneven shares and find each share's neighbours' rows, as ranks would receive them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from patchpar.comm.exchange_part import Halo


def cut(whole: Tensor, starts: Sequence[int], dim: int) -> list[Tensor]:
    """Shares of `whole` along `dim`; `starts` ends with the whole size."""
    return [whole.narrow(dim, a, b - a) for a, b in pairwise(starts)]


def with_halo(whole: Tensor, starts: Sequence[int], dim: int, before: int, after: int) -> Iterator[tuple[Tensor, Halo]]:
    """Each share with `before` rows above it and `after` rows below it; None at an edge of the image."""
    for a, b in pairwise(starts):
        above = whole.narrow(dim, a - before, before) if a and before else None
        below = whole.narrow(dim, b, after) if b < starts[-1] and after else None
        yield whole.narrow(dim, a, b - a), Halo(above, below)
