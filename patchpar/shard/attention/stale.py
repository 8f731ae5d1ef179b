"""Attention of a rank's queries to its own fresh keys and stale keys of the other ranks.

    exact call    fresh keys of all ranks are gathered and stored
    else          stored keys are attended to, while this rank's are sent for the next step

For bands of images and for ranges of tokens alike. Text in joint attention is always fresh: every rank computes all of
it, or each its own part, whose keys and values are gathered in the step that reads them.

Stale keys are DistriFusion's (arXiv:2402.19481); near keys, averages and corrections: docs/decisions/0012 and 0017.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather
from patchpar.comm.exchange_part import Received, collectives_of
from patchpar.comm.transport import Messages, Work
from patchpar.plan.exchange_policy import CachedPartials, StaleKV
from patchpar.shard.attention.fresh_exchange import fits_with_text
from patchpar.shard.attention.late_tokens import LateTokens
from patchpar.shard.attention.partial import Partial, attend_locally, merge_partials
from patchpar.shard.attention.stale_kv import RemoteTokens
from patchpar.shard.attention.stale_partials import KeysValues, RemotePartials, first_partials
from patchpar.shard.attention.token_buffer import attend_to_tokens, fresh_part, in_batches
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.guidance_call import StaleEntry
from patchpar.shard.stale.send_window import LateExchange
from patchpar.shard.stale.stale_layout import StaleLayout, check_room, expected_bytes, of_calls
from patchpar.shard.stale.token_grid import LevelGrid
from patchpar.shard.stale.token_slots import TokenSlots
from patchpar.shard.stale.workspace import Workspace

DRIFT_STRIDE = 16  # tokens


def attend_with_past(
    patch: LocalPatch,
    where: str,
    grid: LevelGrid,
    call: AttentionCall,
    entry: StaleEntry,
    text: TokenSlots | None = None,
) -> Tensor:
    """Return the output [B, N, q, D] of this rank's queries. Raises ExchangeError.

    The call's keys and values [B, M, c + l, D] are the common tokens, then this rank's. With a `text`, of which each
    rank has so many tokens, they are this rank's of the text, then of the image; not with cached partial attention. Its
    mask is added to the logits and has a column for every common token, or those of the whole text, then for every
    token of the whole in order. Its kernel gets all keys at once, but for cached partial attention.
    """
    if patch.policy.resync is not None:
        _note_drift(patch, entry, _own(grid, call, patch.group_rank).k_BlND)
    if isinstance(patch.policy.context, CachedPartials):
        return _attend_beside_partials(patch, where, grid, call, entry)
    return _attend_beside_tokens(patch, where, grid, call, entry, text)


def _here(call: AttentionCall) -> KeysValues:
    """Return the local keys and values: common tokens, then this rank's."""
    return KeysValues(call.key.transpose(1, 2), call.value.transpose(1, 2))


def _own(grid: LevelGrid, call: AttentionCall, group_rank: int) -> KeysValues:
    """Return the keys and values of this rank's tokens alone."""
    here, own = _here(call), grid.num_tokens(group_rank)
    return here if here.k_BlND.shape[1] == own else KeysValues(*(x[:, -own:] for x in here))


def _columns(grid: LevelGrid, call: AttentionCall, group_rank: int, *, here: bool) -> Tensor | None:
    """Return the columns of the mask for the tokens of one rank, with `here` for the common tokens too."""
    mask = call.attn_mask
    if mask is None or mask.shape[-1] == 1:
        return mask
    common = mask.shape[-1] - grid.total_tokens
    columns = mask.narrow(-1, common + grid.start(group_rank), grid.num_tokens(group_rank))
    return torch.cat([mask[..., :common], columns], dim=-1) if here and common else columns


def _columns_of_common(grid: LevelGrid, call: AttentionCall) -> Tensor | None:
    mask = call.attn_mask
    return mask if mask is None or mask.shape[-1] == 1 else mask[..., : mask.shape[-1] - grid.total_tokens]


def _attend_now(
    patch: LocalPatch, where: str, grid: LevelGrid, call: AttentionCall, layout: StaleLayout, fresh: Tensor
) -> Tensor:
    """Attend to fresh tokens of all ranks, which are gathered in `fresh` [T, 2, B, N, D] beside the local ones.

    Where ranks gather in one operation all keys arrive at once, and one attention reads them. Over other links each
    rank's are attended to as they arrive.
    """
    text, parts = layout.text, [fresh_part(patch.axis, layout.fresh, fresh)]
    if text is not None:
        parts.append(fresh_part(patch.axis, text, fresh, "text"))
    if patch.comm.transport.collectives is not None:
        for each in [patch.comm.exchange(where, [part]) for part in parts]:  # in place, without a copy of both
            each.wait()
        return attend_to_tokens(call, fresh, call.attn_mask)
    pending = patch.comm.exchange(where, parts)
    if call.kernel is not None:
        pending.wait()
        return attend_to_tokens(call, fresh, call.attn_mask)

    return merge_partials(_arriving(patch, grid, call, pending, None if text is None else fresh[: text.total])).out_BNlD


def _arriving(
    patch: LocalPatch, grid: LevelGrid, call: AttentionCall, pending: Work[Any], text: Tensor | None
) -> Iterator[Partial]:
    """Yield attention to the local tokens, and to each rank's as they arrive; then to a `text` [t, 2, B, N, D]."""
    mine = patch.group_rank
    if text is None:
        yield _attend_here(grid, call, mine)
    else:
        yield _attend_to(call, _own(grid, call, mine), _columns(grid, call, mine, here=False))
    for group_rank, (tokens, *_) in zip(patch.axis.others, pending.arriving(), strict=True):
        yield _attend_to(call, in_batches(tokens), _columns(grid, call, group_rank, here=False))
    if text is not None:
        yield _attend_to(call, in_batches(text), _columns_of_common(grid, call))


def _gather(patch: LocalPatch, where: str, grid: LevelGrid, own: KeysValues) -> Work[Messages]:
    gather = AllGather(patch.comm, patch.axis, "kv", where)
    return gather.start(own, lambda group_rank: own.specs(grid.num_tokens(group_rank)))


def _attend_here(grid: LevelGrid, call: AttentionCall, group_rank: int) -> Partial:
    return _attend_to(call, _here(call), _columns(grid, call, group_rank, here=True))


def _attend_to(call: AttentionCall, tokens: KeysValues, bias: Tensor | None) -> Partial:
    k_BNkD, v_BNkD = (x.transpose(1, 2) for x in tokens)
    return attend_locally(call.query, k_BNkD, v_BNkD, bias=bias, scale=call.scale)


def _attend_beside_tokens(
    patch: LocalPatch, where: str, grid: LevelGrid, call: AttentionCall, entry: StaleEntry, text: TokenSlots | None
) -> Tensor:
    """Attend to a selection of the other ranks' stale tokens, and send this rank's for the next step."""
    options, cache = patch.policy.context, patch.cache
    assert isinstance(options, StaleKV)
    assert cache is not None
    here, known = KeysValues(call.key.transpose(1, 2), call.value.transpose(1, 2)), entry.state
    late_no_more = patch.frozen and isinstance(known, LateTokens)  # frozen: nothing is sent late
    if known is None or late_no_more or (known.layout.text is not text and known.layout.text != text):
        layout = _layout(patch, grid, here, options, text)
        if cache.is_first_state():
            expected = expected_bytes(layout, patch.layers_like(where) * cache.calls_left)
            what = of_calls("keys and values", cache.calls_left)
            check_room(expected, patch.axis.size, call.key.device, patch.policy.name, what)
        entry.state = _new_state(patch, where, entry, layout, call.key)
    state: RemoteTokens = entry.state
    if patch.fresh:
        return _attend_and_remember(patch, where, grid, call, entry)
    pending = _pending_tokens(patch, state, entry)
    attended = state.write(here)
    if patch.frozen:
        state.repeat(attended, patch.step_ratio)
        return state.attend(call, attended)
    state.refresh(attended, patch.step_ratio, fits_with_text(patch, where, attended, state, pending))
    if isinstance(state, LateTokens):
        return state.attend(call, attended)
    if state.derived and not state.layout.joins:
        entry.pending = _sent(patch, where, attended, state, entry)
        return state.attend(call, attended)
    result = state.attend(call, attended)  # before the next values may arrive where it reads
    entry.pending = _sent(patch, where, attended, state, entry)
    return result


def _pending_tokens(patch: LocalPatch, state: RemoteTokens, entry: StaleEntry) -> Work[Any] | None:
    """Return the exchange that brings the stale tokens, if it may be awaited with the corrections; else wait for it."""
    if isinstance(state, LateTokens):
        assert patch.cache is not None
        patch.cache.window.reach(state.index)
        pending = state.take_gather()
        if pending is not None:
            entry.pending = None
            return pending
    state.arrived(entry.pop())
    return None


def _attend_and_remember(
    patch: LocalPatch, where: str, grid: LevelGrid, call: AttentionCall, entry: StaleEntry
) -> Tensor:
    """Attend to fresh tokens of all ranks, and store what the next step needs of them."""
    cache, state = patch.cache, entry.state
    assert cache is not None
    assert isinstance(state, RemoteTokens)
    state.arrived(entry.pop())
    fresh = state.write_fresh(_here(call))
    result = _attend_now(patch, where, grid, call, state.layout, fresh)
    state.remember(fresh, patch.step_ratio, continues=entry.continues)
    return result


def _new_state(patch: LocalPatch, where: str, entry: StaleEntry, layout: StaleLayout, like: Tensor) -> RemoteTokens:
    """Return the state of an exchange point that has run for the first time, in its window if it sends late."""
    cache = patch.cache
    assert cache is not None
    if not layout.is_late:
        return RemoteTokens(layout, like, cache.workspace)
    state = LateTokens(layout, like, cache.workspace)

    def start(memory: Workspace) -> None:
        state.receive_into(memory, patch.step_ratio)
        if state.rows is None:
            entry.pending = cache.send_at_once(state.late_part(), where)
        else:
            state.gather(cache.comm, where)
            entry.pending = state.receive

    state.index = cache.window.add(LateExchange(start, entry.drop))
    return state


def _layout(
    patch: LocalPatch, grid: LevelGrid, here: KeysValues, options: StaleKV, text: TokenSlots | None
) -> StaleLayout:
    batch, local, heads, width = here.k_BlND.shape
    return StaleLayout(
        options,
        patch.axis,
        grid,
        token=(2, batch, heads, width),
        itemsize=here.k_BlND.element_size(),
        common=local - grid.num_tokens(patch.group_rank) if text is None else text.total,
        joins=patch.policy.published or options.narrow_to is not None,  # as DistriFusion's code does
        may_wait=collectives_of(patch.comm.transport, patch.axis.ranks) is not None and not patch.frozen,
        text=text,
    )


def _sent(
    patch: LocalPatch, where: str, attended: Tensor, state: RemoteTokens, entry: StaleEntry
) -> Callable[[], Received]:
    """Send this rank's tokens for the next step; return a function that waits for the others'."""
    assert patch.cache is not None
    if patch.policy.published:
        return patch.cache.send(state.part(attended), where, entry)
    if state.rows is not None:
        return patch.cache.gather_at_once(patch.axis, where, state.rows)
    pending = state.start(patch.cache.comm, where, attended, entry.memory)
    return pending or patch.cache.send_at_once(state.part(attended), where, entry.memory)


def _attend_beside_partials(
    patch: LocalPatch, where: str, grid: LevelGrid, call: AttentionCall, entry: StaleEntry
) -> Tensor:
    """Attend to local keys and merge the cached partial over the others' tokens; each layer refreshes it in turn."""
    options, cache = patch.policy.context, patch.cache
    assert isinstance(options, CachedPartials)
    assert cache is not None
    layer, cache.attentions = cache.attentions, cache.attentions + 1
    if entry.state is None:
        entry.state = first_partials(patch, where, grid, call, options.refresh)
    state: RemotePartials = entry.state

    def renewed(received: dict[int, list[Tensor]]) -> Partial:
        found = {group_rank: KeysValues(*tensors) for group_rank, tensors in received.items()}
        return merge_partials(
            _attend_to(call, tokens, _columns(grid, call, group_rank, here=False))
            for group_rank, tokens in found.items()
        )

    ranks = patch.axis.ranks
    if patch.fresh:
        entry.drop()
        arriving = _gather(patch, where, grid, _own(grid, call, patch.group_rank)).arriving()
        whole = dict(zip(patch.axis.others, arriving, strict=True))
        state.put(renewed(whole))
        if state.is_due(cache.evaluation + 1, layer):  # the refresh of the next step uses these keys
            entry.put({ranks[group_rank]: tensors for group_rank, tensors in whole.items()}, entry.own)
    elif state.is_due(cache.evaluation, layer) and not patch.frozen:
        received = entry.pop()
        if received:
            state.put(renewed({ranks.index(rank): tensors for rank, tensors in received.items()}))
    if not patch.fresh and state.is_due(cache.evaluation + 1, layer) and not patch.frozen:
        entry.pending = cache.send_at_once(state.part(_own(grid, call, patch.group_rank)), where, entry.memory)
    return merge_partials([_attend_here(grid, call, patch.group_rank), state.remote]).out_BNlD


def _note_drift(patch: LocalPatch, entry: StaleEntry, key_BlND: Tensor) -> None:
    """Add the drift of this rank's keys since the previous step, from every sixteenth token."""
    assert patch.cache is not None
    sample = key_BlND[:, ::DRIFT_STRIDE]
    stored = entry.memory.like("keys", sample, torch.float32)  # a view would keep all keys
    known = entry.own is stored
    change = (sample - stored).square().sum() if known else None
    entry.own = stored.copy_(sample)
    if change is not None:
        patch.cache.drift += torch.stack([change, stored.square().sum()])
