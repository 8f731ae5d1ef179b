"""Attention over a part of the keys, and its merge over all parts.

Shape letters: B batch, N heads, l queries, k keys of a part, D head width.

Parts are merged by their log-sum-exp (Milakov & Gimelshein 2018, arXiv:1805.02867), as in ring attention.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import is_fused
from patchpar.shard.attention.lse_kernels import attend_with_lse
from patchpar.shard.kernels.merge_partials import merge_attention, merge_in_turn


class Partial(NamedTuple):
    """Attention over some of the keys: output, and log-sum-exp of the logits in fp32 or wider."""

    out_BNlD: Tensor
    lse_BNl: Tensor


def attend(
    q_BNlD: Tensor, k_BMkD: Tensor, v_BMkD: Tensor, scale: float | None = None, *, bias: Tensor | None = None
) -> Partial:
    """Return attention with its log-sum-exp, by the fused kernel of the device where there is one.

    M of the heads of keys may be shared by N / M queries each. `bias` is added to the logits and broadcasts to
    [B, N, l, k].
    """
    return Partial(*attend_with_lse(q_BNlD, k_BMkD, v_BMkD, bias, scale))


def merge_partials(partials: Iterable[Partial]) -> Partial:
    """Merge attention over parts of the keys, [B, N, l, D] and [B, N, l], in fp32 (arXiv:2310.01889).

    On a GPU all parts by one kernel; elsewhere one by one, so that each is merged before the next is waited for.
    """
    parts = iter(partials)
    first = next(parts, None)
    assert first is not None, "attention over no keys"
    if not is_fused(first.out_BNlD):
        return Partial(*merge_in_turn(chain([first], parts)))
    if not (others := list(parts)):
        return first
    outs, lses = (laid_alike(tensors) for tensors in zip(first, *others, strict=True))
    return Partial(*merge_attention(outs[0], lses[0], outs[1:], lses[1:]))


def laid_alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, all of the same shape, in one memory layout: they have it where they are of one kernel."""
    if len({x.stride() for x in tensors}) == 1:
        return list(tensors)
    layout = torch.empty_like(tensors[0])
    return [x if x.stride() == layout.stride() else torch.empty_like(layout).copy_(x) for x in tensors]
