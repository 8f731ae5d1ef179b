"""One attention call in a block whose tokens are split: own queries and the keys of all ranks, fresh or stale.

Where queries and keys are the same tokens, as nearly always, or the queries are our tokens alone, any exact mode of
`shard.attention` computes it. Other calls (common tokens attend to split ones, or a mask is not whole) gather the keys
first. Common tokens are those that every rank holds, such as text that is not split.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.errors import UnsupportedModel
from patchpar.plan.exchange_policy import ExchangePolicy, StaleKV
from patchpar.plan.kv_selection import AllRows
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.attention_memory import AttentionMemory
from patchpar.shard.attention.sharded_qkv import ShardedQKV, as_bias
from patchpar.shard.attention.stale import attend_with_past
from patchpar.shard.attention.ulysses import Mode
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.guidance_call import StaleEntry
from patchpar.shard.stale.token_grid import LevelGrid
from patchpar.shard.transformer.attention_backend import BackendKernel
from patchpar.shard.transformer.attention_mask import whole_mask
from patchpar.shard.transformer.split_tokens import CallRuns, PlacedCall, SplitTokens
from patchpar.shard.transformer.token_ranges import Cut, TokenRanges, spread


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """How tokens are split between the ranks of an axis, and the `mode` of attention between them.

    `mode` None exchanges nothing, wrong on purpose. `patch`: holds the stale keys and values of strategies that use
    them. `kernel`: the user's own, called with own queries and the keys of all ranks at once. `cut`: the unit of the
    split. `text`: whether a second run of tokens is split too, such as text; else every rank computes all of it.
    """

    comm: Communicator
    axis: Axis
    mode: Mode | None
    patch: LocalPatch | None = None
    kernel: BackendKernel | None = None
    cut: Cut = "runs"
    text: bool = True

    def text_ranges(self, tokens: int) -> TokenRanges | None:
        """Return the ranges of a second run of so many tokens, such as text; None where every rank computes all."""
        axis = self.axis
        if not self.text or not 1 < axis.size <= tokens:
            return None
        return spread(tokens, axis.rank, axis.size, ratio=axis.ratio)

    def attend_remembered(
        self, where: str, keys: SplitTokens, queries: SplitTokens, image: TokenRanges, call: AttentionCall
    ) -> Tensor | None:
        """Return the attention output [B, N, q, E] to remembered tokens; None where keys of other ranks are exchanged.

        `image`: the ranges of the first run of tokens.
        """
        return None

    def gather(self, x: Tensor, dim: int, placed: SplitTokens, where: str) -> Tensor:
        """Return x, of any shape, with the tokens of all ranks along `dim`; ours are where `placed` says.

        Everything around our tokens is kept. Raises ExchangeError.
        """
        return self.gather_together([x], dim, placed, where)[0]

    def gather_together(self, tensors: Sequence[Tensor], dim: int, placed: SplitTokens, where: str) -> list[Tensor]:
        """Return each tensor, of any shape, as `gather` does, all of them in one message. Raises ExchangeError."""
        if self.axis.size == 1 or not placed.runs:
            return list(tensors)
        parted = [placed.parted(x, dim) for x in tensors]
        ranges = [run.ranges for run in placed.runs]

        def specs(group_rank: int) -> list[TensorSpec]:
            sizes = [each.sizes[group_rank] for each in ranges]
            return [_resized(own, dim, size) for _, tokens in parted for own, size in zip(tokens, sizes, strict=True)]

        own = [x.contiguous() for _, tokens in parted for x in tokens]
        by_run = iter(zip(*AllGather(self.comm, self.axis, "tokens", where).start(own, specs).wait(), strict=True))
        return [placed.joined(common, [each.joined(next(by_run), dim) for each in ranges], dim) for common, _ in parted]


def _resized(x: Tensor, dim: int, size: int) -> TensorSpec:
    """Return the spec of x with another size along `dim`."""
    dim %= x.ndim
    return TensorSpec((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)


def cut_for(policy: ExchangePolicy) -> Cut:
    """Return the units that tokens are split in: where all keys are fresh any will do, and runs are the most even.

    Whole rows where a rank sees only near rows of another rank, or averages of them.
    """
    context = policy.context
    if not policy.remembers:
        return "runs"
    everything = not isinstance(context, StaleKV) or (context.narrow_to or context.selection) == AllRows()
    return "bands" if everything else "rows"


def attend_split(
    split: TokenSplit, where: str, runs: CallRuns, call: AttentionCall, memory: AttentionMemory | None = None
) -> Tensor:
    """Return the attention output [B, N, q, E] of this rank's queries, or [B, q, E] of a call without heads.

    `call` has the tensors of this rank: common tokens and its own of each run, [B, N, q, D], [B, M, k, D] and
    [B, M, k, E], or without the dim of heads. `memory`: for what exact attention exchanges, if the transport has
    operations of all ranks. Raises UnsupportedModel, ExchangeError.
    """
    if call.dropout_p:
        raise UnsupportedModel(f"{where}: attention with dropout cannot be split: put the model in eval mode")
    if call.query.ndim == 3:
        return attend_split(split, where, runs, call.with_heads(), memory).squeeze(1)
    if call.attn_mask is not None and call.attn_mask.ndim == 2 and runs.runs[0][0].mask_dims == 4:
        # diffusers' dispatcher takes a mask [batch, keys] for one of keys, but only where all keys are there
        call = call._replace(attn_mask=call.attn_mask[:, None, None])
    placed = runs.placed(call.query.shape[-2], call.key.shape[-2])
    queries, keys, first, _ = placed
    if not first:
        return call._replace(attn_mask=queries.rows(call.attn_mask)).run()
    if call.attn_mask is not None or call.is_causal:
        mask = whole_mask(split.gather, where, call, queries, keys, first)
        call = call._replace(attn_mask=mask, is_causal=False)
    remembered = split.attend_remembered(where, keys, queries, runs.runs[0][1], call)
    return _attend_with_others(split, where, runs, call, placed, memory) if remembered is None else remembered


def _attend_with_others(
    split: TokenSplit,
    where: str,
    runs: CallRuns,
    call: AttentionCall,
    placed: PlacedCall,
    memory: AttentionMemory | None,
) -> Tensor:
    queries, keys, *_ = placed
    if split.mode is None or split.axis.size == 1:
        rows = queries.rows(call.attn_mask)
        return call._replace(attn_mask=None if rows is None else keys.cut(rows, -1), kernel=None).run()
    patch = split.patch
    if patch is not None and patch.cache is not None and runs.runs[0][0].keys is not None:  # a text is never stale
        entry = patch.entry(where, patch.policy.context)
        if entry is not None:
            return _attend_with_past(split, where, runs.rows, call, placed, entry)
    if _fits_a_mode(call, queries, keys):
        return _by_mode(split, split.mode, where, call, placed, memory)
    key, value = split.gather_together((call.key, call.value), -2, keys, where)
    return call._replace(key=key, value=value, attn_mask=queries.rows(call.attn_mask)).run()


def _attend_with_past(
    split: TokenSplit,
    where: str,
    grid: LevelGrid,
    call: AttentionCall,
    placed: PlacedCall,
    entry: StaleEntry,
) -> Tensor:
    """Attend to stale tokens of the image. Of a text that is split, the tokens of all ranks are of this step."""
    queries, keys, _, text = placed
    assert split.patch is not None
    slots, columns = None, None
    if text is not None and text.is_alone and isinstance(split.patch.policy.context, StaleKV):
        keys, columns, slots = text.here, text.whole, text.slots  # gathered where attention reads it
    elif text is not None:
        key, value = split.gather_together((call.key, call.value), -2, text.text, where)
        call, keys = call._replace(key=key, value=value), text.whole
    stale = common_first(where, call, queries, keys, columns)
    out = attend_with_past(split.patch, where, grid, stale, entry, slots)
    return out if queries.is_common_first else queries.in_order(out, 2)


def _fits_a_mode(call: AttentionCall, queries: SplitTokens, keys: SplitTokens) -> bool:
    mask = call.attn_mask
    rows_whole = mask is None or mask.ndim < 2 or mask.shape[-2] in (1, queries.whole)
    shaped = call.query.ndim == 4 and call.value.shape[-1] == call.key.shape[-1]
    return rows_whole and shaped and (queries is keys or queries.own == queries.local == keys.own)


def common_first(
    where: str, call: AttentionCall, queries: SplitTokens, keys: SplitTokens, columns: SplitTokens | None = None
) -> AttentionCall:
    """Return the call in the order of `attend_with_past`: common tokens, then our own. Raises UnsupportedModel.

    `columns`: those of the mask, if not `keys`.
    """
    if call.value.shape[-1] != call.key.shape[-1]:
        raise UnsupportedModel(f"{where}: values of another width than keys need strategy 'exact'")
    if call.attn_mask is None and queries.is_common_first and keys.is_common_first:
        return call  # as nearly always
    query, key, value = _tensors_common_first(call, queries, keys)
    mask = queries.rows(call.attn_mask)
    if mask is not None:
        mask = (columns or keys).by_rank(mask, -1) if mask.shape[-1] > 1 else mask
        mask = queries.common_first(mask, -2) if mask.ndim > 1 and mask.shape[-2] > 1 else mask
        mask = as_bias(mask[(None,) * (4 - mask.ndim)], query.dtype)
    return call._replace(query=query, key=key, value=value, attn_mask=mask)


def _tensors_common_first(call: AttentionCall, queries: SplitTokens, keys: SplitTokens) -> tuple[Tensor, ...]:
    if queries.is_common_first and keys.is_common_first:
        return call[:3]
    return queries.common_first(call.query, 2), keys.common_first(call.key, 2), keys.common_first(call.value, 2)


def _by_mode(
    split: TokenSplit,
    mode: Mode,
    where: str,
    call: AttentionCall,
    placed: PlacedCall,
    memory: AttentionMemory | None,
) -> Tensor:
    queries, keys, (query, key, value, mask) = placed[0], placed[1], call[:4]
    if not (queries.is_common_first and keys.is_common_first):
        query, key, value = _tensors_common_first(call, queries, keys)
    if mask is not None:
        for dim, line in ((-1, keys), (-2, queries)):
            if mask.ndim >= -dim and mask.shape[dim] > 1:
                mask = line.by_rank(mask, dim)
    shared = ShardedQKV(
        q_BNlD=query,
        k_BMlD=key,
        v_BMlD=value,
        sizes=keys.sizes,
        group_rank=split.axis.rank,
        common=keys.common,
        common_asks=queries is keys,
        mask=mask,
        scale=call.scale,
        kernel=call.kernel,
        memory=memory,
    )
    out = mode(split.comm, split.axis, where, shared)
    return out if queries.is_common_first else queries.in_order(out, 2)
