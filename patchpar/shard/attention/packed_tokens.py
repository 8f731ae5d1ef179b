"""Tensors of the same tokens in one buffer with tokens outermost, so that the parts of several ranks joined are whole.

    each rank        [l, B, M + M, D]     keys beside values, written by one kernel
    all together     [L, B, M + M, D]     one buffer; keys and values are views of it, which attention reads as they are

Shape letters: B batch, N heads of one tensor, l tokens of a rank, L of all, D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def pack_tokens(tensors_BNlD: Sequence[Tensor], *, into: Tensor | None = None) -> Tensor:
    """Return the tensors side by side, [l, B, sum of N, D], in `into` where it is given."""
    by_token: list[Tensor] = []
    for x in tensors_BNlD:
        # detached: where gradients are recorded nothing can be written to a buffer, and none pass through other ranks
        alone = x.detach() if x.requires_grad and into is not None else x
        by_token.append(alone.permute(2, 0, 1, 3))
    return torch.cat(by_token, 2) if into is None else torch.cat(by_token, 2, out=into)


def unpack_tokens(packed: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """Return views [B, N, l, D] of packed tensors with so many heads."""
    return list(packed.permute(1, 2, 0, 3).split_with_sizes(list(heads), 1))
