"""One attention call in a block whose tokens are split: own queries against everybody's keys, of this step or the last.

Where queries and keys are the same tokens, as nearly always, or the queries are our tokens alone, any exact mode of
`sequence` does it. Other calls (what everybody has asks the tokens, or a mask that is no longer whole) gather the keys
first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.errors import UnsupportedModel
from patchpar.plan.exchange_policy import ExchangePolicy, StaleKV
from patchpar.plan.kv_selection import AllRows
from patchpar.plan.mesh import Axis
from patchpar.shard.attention import stale as stale_attention
from patchpar.shard.attention.sharded_qkv import ShardedQKV, as_bias
from patchpar.shard.attention.stale import attend_with_past
from patchpar.shard.attention.stale_kv import KeysValues
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.transformer.attention_backend import BackendKernel
from patchpar.shard.transformer.token_plan import AttentionCall, TokenRows
from patchpar.shard.transformer.token_ranges import Cut, TokenRanges

Mode = Callable[[Communicator, Axis, str, ShardedQKV], Tensor]


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """How tokens are split between the places of an axis, and how their keys meet (None: never, wrong on purpose).

    `share`: what is remembered of the last step, where keys of the last step are attended to. `kernel`: the user's own,
    called on own queries and everybody's keys at once. `cut`: by what tokens are split.
    """

    door: Communicator
    axis: Axis
    mode: Mode | None
    share: LocalPatch | None = None
    kernel: BackendKernel | None = None
    cut: Cut = "runs"

    def gather(self, x: Tensor, dim: int, start: int, shares: TokenRanges, where: str) -> Tensor:
        """`x` with everybody's tokens, of which ours start at `start`; whatever is around them stays."""
        before, own, after = x.split_with_sizes((start, shares.count, x.shape[dim] - start - shares.count), dim)
        parts = AllGather(self.door, self.axis, "tokens", where).shares(own.contiguous(), dim, shares.sizes)
        return torch.cat([before, shares.joined(parts, dim), after], dim)


def cut_for(treatment: ExchangePolicy) -> Cut:
    """What tokens are split by: where all keys are of this step it makes no difference, and runs are the most even.

    Whole rows where a place sees only near rows of another, or averages of them.
    """
    context = treatment.context
    if not treatment.remembers:
        return "runs"
    everything = not isinstance(context, StaleKV) or (context.narrow_to or context.selection) == AllRows()
    return "bands" if everything else "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaArguments:
    """The arguments of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def answer(
        self,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        causal: bool = False,
        kernel: BackendKernel | None = None,
    ) -> Tensor:
        """Attention of these queries to other keys."""
        attend: Any = kernel if kernel is not None and self.query.ndim == 4 else F.scaled_dot_product_attention
        found: Tensor = attend(
            self.query, key, value, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=self.enable_gqa
        )
        return found


def attend_split(
    split: TokenSplit, where: str, call: AttentionCall, shares: TokenRanges, asked: SdpaArguments
) -> Tensor:
    """What the call gives for our queries, tokens being split so. Raises UnsupportedModel, ExchangeError."""
    if asked.dropout_p:
        raise UnsupportedModel(f"{where}: attention with dropout cannot be split: put the model in eval mode")
    if call.mask_dims == 4 and asked.attn_mask is not None and asked.attn_mask.ndim == 2:
        # diffusers' dispatcher makes a mask of keys out of [batch, keys], but only where all keys are there
        asked = replace(asked, attn_mask=asked.attn_mask[:, None, None])
    queries = _SplitTokens.of(call.queries, asked.query, shares)
    if call.keys is None:
        mask = None if asked.attn_mask is None else queries.cut(asked.attn_mask, -2)
        return asked.answer(asked.key, asked.value, mask, causal=asked.is_causal, kernel=split.kernel)
    keys = _SplitTokens.of(call.keys, asked.key, shares)
    mask = _whole_mask(split, where, asked, queries, keys)
    if split.mode is None or split.axis.size == 1:
        cut = None if mask is None else keys.cut(queries.cut(mask, -2), -1)
        return asked.answer(asked.key, asked.value, cut)
    slot = None if split.share is None else split.share.slot(where, split.share.treatment.context)
    if split.share is not None and slot is not None:
        rows = None if mask is None else queries.cut(mask, -2)
        past = _with_past(where, asked, (queries, keys), rows, split.kernel)
        out = queries.in_order(attend_with_past(split.share, where, shares.rows, past, slot), 2)
        return out.squeeze(1) if asked.query.ndim == 3 else out
    if split.kernel is None and _fits_a_mode(asked, queries, keys, mask):
        return _by_mode(split, where, asked, (queries, keys), mask)
    key, value = (split.gather(x, -2, keys.start, shares, where) for x in (asked.key, asked.value))
    return asked.answer(key, value, None if mask is None else queries.cut(mask, -2), kernel=split.kernel)


@dataclass(frozen=True, slots=True)
class _SplitTokens:
    """Queries or keys of a call: `local` are here, `own` of them our tokens, from `start` on; of all places `whole`."""

    start: int
    local: int
    shares: TokenRanges

    @classmethod
    def of(cls, rows: TokenRows | None, x: Tensor, shares: TokenRanges) -> "_SplitTokens":
        size = x.shape[-2]
        if rows is None:
            return cls(size, size, TokenRanges(place=0, starts=(0, 0)))
        return cls(rows.start(size, shares.count), size, shares)

    @property
    def own(self) -> int:
        return self.shares.count

    @property
    def tokens(self) -> int:
        return self.shares.num_tokens

    @property
    def whole(self) -> int:
        return self.local - self.own + self.tokens

    @property
    def after(self) -> int:
        return self.local - self.own - self.start

    def cut(self, mask: Tensor, dim: int) -> Tensor:
        """A mask that is whole along `dim`, as it is for ours."""
        if mask.ndim < -dim or mask.shape[dim] in (1, self.local) or self.own == self.tokens:
            return mask
        before, tokens, after = mask.split_with_sizes((self.start, self.tokens, self.after), dim)
        return torch.cat([before, self.shares.own(tokens, dim), after], dim)

    def common_first(self, x: Tensor, dim: int) -> Tensor:
        """What everybody has first, then our tokens."""
        before, own, after = x.split_with_sizes([self.start, self.own, self.after], dim)
        return torch.cat([before, after, own], dim) if self.after else x

    def by_place(self, mask: Tensor, dim: int) -> Tensor:
        """A mask that is whole along `dim`: what everybody has first, then each place's tokens."""
        before, tokens, after = mask.split_with_sizes([self.start, self.tokens, self.after], dim)
        return torch.cat([before, after, self.shares.by_place(tokens, dim)], dim)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """The other way round."""
        before, after, own = x.split_with_sizes([self.start, self.after, self.own], dim)
        return torch.cat([before, own, after], dim) if self.after else x


def _whole_mask(
    split: TokenSplit, where: str, asked: SdpaArguments, queries: _SplitTokens, keys: _SplitTokens
) -> Tensor | None:
    """The mask with a column for every key of the whole, in their order; causality as a mask."""
    mask = asked.attn_mask
    if asked.is_causal:
        size = (queries.whole, keys.whole)
        return torch.ones(size, dtype=torch.bool, device=asked.query.device).tril()
    if mask is None or mask.shape[-1] in (1, keys.whole):
        return mask
    if mask.shape[-1] == keys.whole + keys.local:  # diffusers pads a mask of more columns than keys by their number
        return mask[..., : keys.whole]
    if mask.shape[-1] != keys.local:
        raise UnsupportedModel(
            f"{where}: a mask of {mask.shape[-1]} columns is neither for the {keys.local} keys that are here nor for "
            f"all {keys.whole}"
        )
    if mask.ndim < 2 or mask.shape[-2] == 1:
        return split.gather(mask, -1, keys.start, keys.shares, where)
    if queries == keys and _sees_itself_alone(mask, keys):
        return _with_blind_columns(as_bias(mask, asked.query.dtype), keys)
    return _outer_product(split, where, mask, queries, keys)


def _sees_itself_alone(mask: Tensor, keys: _SplitTokens) -> bool:
    """Whether a mask made in the block lets every token of ours see itself alone of all tokens.

    What is around our tokens has to see all of them alike. One token could not tell.
    """
    columns = as_bias(mask, torch.float32).narrow(-1, keys.start, keys.own)
    first, own, last = columns.split_with_sizes((keys.start, keys.own, keys.after), -2)
    around = torch.cat([first, last], -2)
    itself = torch.eye(keys.own, dtype=torch.bool, device=mask.device)
    return (
        keys.own > 1
        and torch.equal(around, around[..., :1].expand(around.shape))
        and bool((own.isneginf() != itself).all())
    )


def _with_blind_columns(bias: Tensor, keys: _SplitTokens) -> Tensor:
    """Such a mask with columns for the tokens of other places: ours are blind to them, the rest sees them as ours."""
    before, own, after = bias.split_with_sizes((keys.start, keys.own, keys.after), -1)
    foreign = own[..., :1].clone()
    foreign.narrow(-2, keys.start, keys.own).fill_(-torch.inf)
    columns = [foreign.expand(*own.shape[:-1], size) for size in keys.shares.sizes]
    columns[keys.shares.place] = own
    return torch.cat([before, keys.shares.joined(columns, -1), after], -1)


def _outer_product(split: TokenSplit, where: str, mask: Tensor, queries: _SplitTokens, keys: _SplitTokens) -> Tensor:
    """A mask made in the block from what is here, of tokens that count and tokens that do not."""
    if mask.dtype != torch.bool:
        raise UnsupportedModel(
            f"{where}: a {mask.dtype} mask is made from the tokens that are here: it cannot be split"
        )
    rows, columns = mask.any(-1, keepdim=True), mask.any(-2, keepdim=True)
    if not torch.equal(rows & columns, mask):
        raise UnsupportedModel(f"{where}: a mask is made from the tokens that are here, and differs by query and key")
    columns = split.gather(columns, -1, keys.start, keys.shares, where)
    return rows & columns


def _fits_a_mode(asked: SdpaArguments, queries: _SplitTokens, keys: _SplitTokens, mask: Tensor | None) -> bool:
    rows_whole = mask is None or mask.ndim < 2 or mask.shape[-2] in (1, queries.whole)
    shaped = asked.query.ndim in (3, 4) and asked.value.shape[-1] == asked.key.shape[-1]
    own_alone = queries.own == queries.local == keys.own
    return (queries == keys or own_alone) and rows_whole and shaped


def _with_past(
    where: str,
    asked: SdpaArguments,
    lines: tuple[_SplitTokens, _SplitTokens],
    mask: Tensor | None,
    kernel: BackendKernel | None,
) -> stale_attention.StaleAttentionCall:
    """The call as `stale_attention` wants it, of queries and keys: what everybody has, then our tokens."""
    if asked.value.shape[-1] != asked.key.shape[-1]:
        raise UnsupportedModel(f"{where}: values of another width than keys need strategy 'exact'")
    flat = asked.query.ndim == 3
    queries, keys = lines
    query, key, value = (x.unsqueeze(1) if flat else x for x in (asked.query, asked.key, asked.value))
    if mask is not None:
        mask = keys.by_place(mask, -1) if mask.shape[-1] > 1 else mask
        mask = queries.common_first(mask, -2) if mask.ndim > 1 and mask.shape[-2] > 1 else mask
        mask = mask.unsqueeze(1) if flat and mask.ndim == 3 else mask
        mask = as_bias(mask[(None,) * (4 - mask.ndim)], query.dtype)
    k_BlND, v_BlND = (keys.common_first(x, 2).transpose(1, 2) for x in (key, value))
    query = queries.common_first(query, 2)
    here = KeysValues(k_BlND, v_BlND)
    return stale_attention.StaleAttentionCall(query, here, asked.scale, keys.local - keys.own, mask, kernel)


def _by_mode(
    split: TokenSplit, where: str, asked: SdpaArguments, lines: tuple[_SplitTokens, _SplitTokens], mask: Tensor | None
) -> Tensor:
    assert split.mode is not None
    flat = asked.query.ndim == 3
    queries, keys = lines
    tensors = (x.unsqueeze(1) if flat else x for x in (asked.query, asked.key, asked.value))
    query, key, value = (line.common_first(x, 2) for x, line in zip(tensors, (queries, keys, keys), strict=True))
    if mask is not None:
        mask = mask.unsqueeze(1) if flat and mask.ndim == 3 else mask
        for dim, line in ((-1, keys), (-2, queries)):
            if mask.ndim >= -dim and mask.shape[dim] > 1:
                mask = line.by_place(mask, dim)
    shared = ShardedQKV(
        q_BNlD=query,
        k_BMlD=key,
        v_BMlD=value,
        sizes=keys.shares.sizes,
        place=split.axis.rank,
        common=keys.local - keys.own,
        common_asks=queries == keys,
        mask=mask,
        scale=asked.scale,
    )
    out = queries.in_order(split.mode(split.door, split.axis, where, shared), 2)
    return out.squeeze(1) if flat else out
