"""Masks of attention whose tokens are split, with a column for every key of the whole."""

from collections.abc import Callable

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.shard.attention.sharded_qkv import as_bias
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.transformer.split_tokens import SplitTokens
from patchpar.shard.transformer.token_runs import Runs

Gather = Callable[[Tensor, int, SplitTokens, str], Tensor]
"""Returns a tensor with the tokens of all ranks along a dim, for an exchange point. See `TokenSplit.gather`."""


def whole_mask(
    gather: Gather, where: str, call: AttentionCall, queries: SplitTokens, keys: SplitTokens, first: Runs
) -> Tensor | None:
    """Return the mask with a column for every key of the whole, in their order; causality as a mask.

    `first`: the first run of keys, which alone may be cut in a mask: that of the text is an argument of the model.
    """
    mask = call.attn_mask
    if call.is_causal:
        size = (queries.whole, keys.whole)
        return torch.ones(size, dtype=torch.bool, device=call.query.device).tril()
    if mask is None or mask.shape[-1] in (1, keys.whole):
        return mask
    columns = mask.shape[-1]
    if columns == keys.whole + keys.local:  # diffusers pads a mask of more columns than keys by their number
        return mask[..., : keys.whole]
    lacking = sum(ranges.num_tokens - ranges.count for _, ranges in first)
    if columns not in (keys.local, keys.whole - lacking):
        raise UnsupportedModel(
            f"{where}: a mask of {columns} columns is neither for the {keys.local} keys that are here nor for all "
            f"{keys.whole}"
        )
    placed = keys if columns == keys.local else SplitTokens.of(columns, first)
    if mask.ndim < 2 or mask.shape[-2] == 1:
        return gather(mask, -1, placed, where)
    if len(keys.runs) > 1:
        raise UnsupportedModel(f"{where}: a mask of queries and keys is made from the tokens that are here")
    if queries == keys and _sees_itself_alone(mask, keys):
        return _with_blind_columns(as_bias(mask, call.query.dtype), keys)
    return _outer_product(gather, where, mask, keys)


def _sees_itself_alone(mask: Tensor, keys: SplitTokens) -> bool:
    """Whether a mask made in the block lets each of our tokens attend to itself and to no other token.

    Common tokens must attend to all of them alike. A single token would not show this: where a rank has no more, the
    answer is no on all of them, as they gather the mask then.
    """
    ((start, ranges),) = keys.runs
    columns = as_bias(mask, torch.float32).narrow(-1, start, ranges.count)
    around, (own,) = keys.parted(columns, -2)
    common = torch.cat(around, -2)
    itself = torch.eye(ranges.count, dtype=torch.bool, device=mask.device)
    return (
        min(ranges.sizes) > 1
        and torch.equal(common, common[..., :1].expand(common.shape))
        and bool((own.isneginf() != itself).all())
    )


def _with_blind_columns(bias: Tensor, keys: SplitTokens) -> Tensor:
    """Add columns for other ranks' tokens to such a mask: hidden from our tokens, and to common ones as ours are."""
    ((start, ranges),) = keys.runs
    common, (own,) = keys.parted(bias, -1)
    foreign = own[..., :1].clone()
    foreign.narrow(-2, start, ranges.count).fill_(-torch.inf)
    columns = [foreign.expand(*own.shape[:-1], size) for size in ranges.sizes]
    columns[ranges.group_rank] = own
    return keys.joined(common, [ranges.joined(columns, -1)], -1)


def _outer_product(gather: Gather, where: str, mask: Tensor, keys: SplitTokens) -> Tensor:
    """Return the whole mask for one that the block makes from valid and padded tokens on this rank."""
    if mask.dtype != torch.bool:
        raise UnsupportedModel(
            f"{where}: a {mask.dtype} mask is made from the tokens that are here: it cannot be split"
        )
    rows, columns = mask.any(-1, keepdim=True), mask.any(-2, keepdim=True)
    if not torch.equal(rows & columns, mask):
        raise UnsupportedModel(f"{where}: a mask is made from the tokens that are here, and differs by query and key")
    columns = gather(columns, -1, keys, where)
    return rows & columns
