"""A part of a block that every rank computes with the tokens of all ranks, since it cannot be split.

Its attention is split by heads, which are independent, if it calls scaled_dot_product_attention.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from patchpar.comm.collectives import AllGather
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.split_tokens import SplitTokens
from patchpar.shard.transformer.token_plan import Replicated
from patchpar.shard.transformer.token_ranges import TokenRanges, spread
from patchpar.shard.transformer.token_runs import TokenRun

HEADS = -3  # the dim of heads in queries, keys, values and masks


def with_all_tokens(
    split: TokenSplit, where: str, part: Replicated, ranges: TokenRanges, arguments: CallArguments
) -> CallArguments:
    """Return the arguments of a part with the tokens of all ranks; without exchange others' are zeros.

    Raises ExchangeError.
    """

    def fetch(name: str, leaf: Any) -> Any:
        rows = part.inputs.get(name)
        if rows is None or not isinstance(leaf, Tensor):
            return leaf
        placed = SplitTokens.of(leaf.shape[rows.dim], [TokenRun(rows, ranges)])
        if split.mode is not None:
            return split.gather(leaf, rows.dim, placed, where)
        common, (own,) = placed.parted(leaf, rows.dim)
        parts = [
            own if group_rank == ranges.group_rank else _zeros(own, rows.dim, size)
            for group_rank, size in enumerate(ranges.sizes)
        ]
        return placed.joined(common, [ranges.joined(parts, rows.dim)], rows.dim)

    return arguments.map(fetch)


def _zeros(like: Tensor, dim: int, size: int) -> Tensor:
    return like.new_zeros(*like.shape[:dim], size, *like.shape[dim + 1 :])


def own_of(part: Replicated, ranges: TokenRanges, output: Any) -> Any:
    """Return the output of a part cut to our tokens."""
    leaves, structure = tree_flatten(output)
    for number, rows in part.outputs.items():
        leaves[number] = rows.cut(leaves[number], ranges)
    return tree_unflatten(leaves, structure)


def attend_by_heads(split: TokenSplit, where: str, call: AttentionCall) -> Tensor:
    """Return the attention output [B, N, L, E] of all tokens; each rank computes some of the heads.

    `call` has [B, N, L, D] for queries, keys and values of all tokens; one without heads, or with grouped key heads,
    is computed whole by every rank. Raises ExchangeError.
    """
    ranks, heads = split.axis.size, call.query.shape[1] if call.query.ndim == 4 else 1
    if split.mode is None or ranks == 1 or heads < ranks or call.key.shape[1] != heads or call.value.shape[1] != heads:
        return call.run()
    ranges = spread(heads, split.axis.rank, ranks)
    query, key, value = (ranges.own(x, HEADS).contiguous() for x in (call.query, call.key, call.value))
    mask = call.attn_mask
    if mask is not None and mask.ndim >= -HEADS and mask.shape[HEADS] > 1:
        mask = ranges.own(mask, HEADS)
    out = call._replace(query=query, key=key, value=value, attn_mask=mask).run().contiguous()
    return torch.cat(AllGather(split.comm, split.axis, "tokens", where).parts(out, 1, ranges.sizes), 1)
