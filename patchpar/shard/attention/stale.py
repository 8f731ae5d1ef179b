"""Own queries against own keys of this step and what is held of other places' keys of the last one.

    exact call    everybody's keys come now, and are remembered
    else          what is held is attended to, while ours leave for the next step

For bands of pictures and for runs of tokens alike. Tokens that every place has (text, in joint attention) are always of
this step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather
from patchpar.comm.transport import Messages, TensorSpec, Work
from patchpar.plan.exchange_policy import CachedPartials, StaleKV
from patchpar.shard.attention.blockwise import attend_locally
from patchpar.shard.attention.partial import Partial, merge_partials
from patchpar.shard.attention.stale_kv import KeysValues, RemotePartials, RemoteTokens
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.cache import StaleEntry
from patchpar.shard.stale.token_grid import LevelGrid

DRIFT_STRIDE = 16  # tokens


def attend_with_past(share: LocalPatch, where: str, grid: LevelGrid, call: AttentionCall, slot: StaleEntry) -> Tensor:
    """Output [B, N, q, D] of our queries. Raises ExchangeError.

    The call's keys and values [B, M, c + l, D] are tokens that everybody has, then ours. Its mask is added to the
    logits, with a column for every common token, then for every token of the whole in their order. Its kernel gets all
    keys at once where they lie together.
    """
    if share.treatment.resync is not None:
        _note_drift(share, slot, _own(grid, call, share.place).k_BlND)
    if isinstance(share.treatment.context, CachedPartials):
        return _attend_beside_partials(share, where, grid, call, slot)
    return _attend_beside_tokens(share, where, grid, call, slot)


def _here(call: AttentionCall) -> KeysValues:
    """Keys and values that are here: common tokens, then ours."""
    return KeysValues(call.key.transpose(1, 2), call.value.transpose(1, 2))


def _own(grid: LevelGrid, call: AttentionCall, place: int) -> KeysValues:
    """Our tokens alone."""
    here, own = _here(call), grid.num_tokens(place)
    return here if here.k_BlND.shape[1] == own else KeysValues(*(x[:, -own:] for x in here))


def _columns(grid: LevelGrid, call: AttentionCall, place: int, *, here: bool) -> Tensor | None:
    """Columns of the mask for the tokens of one place, and with `here` for the common tokens too."""
    mask = call.attn_mask
    if mask is None or mask.shape[-1] == 1:
        return mask
    common = mask.shape[-1] - grid.total_tokens
    columns = mask.narrow(-1, common + grid.start(place), grid.num_tokens(place))
    return torch.cat([mask[..., :common], columns], dim=-1) if here and common else columns


def _attend_now(
    share: LocalPatch, where: str, grid: LevelGrid, call: AttentionCall, others: dict[int, KeysValues]
) -> Tensor:
    """With everybody's keys of this step, which are left in `others` for the next."""
    pending = _gather(share, where, grid, _own(grid, call, share.place))

    def partials() -> Iterator[Partial]:
        yield _attend_here(grid, call, share.place)
        for place, tensors in zip(share.axis.others, pending.arriving(), strict=True):
            others[place] = KeysValues(*tensors)
            yield _attend_to(call, others[place], _columns(grid, call, place, here=False))

    return merge_partials(partials()).out_BNlD


def _gather(share: LocalPatch, where: str, grid: LevelGrid, own: KeysValues) -> Work[Messages]:
    batch, _, heads, _ = own.k_BlND.shape

    def specs(place: int) -> list[TensorSpec]:
        return [TensorSpec((batch, grid.num_tokens(place), heads, x.shape[-1]), x.dtype) for x in own]

    return AllGather(share.door, share.axis, "kv", where).start(own, specs)


def _attend_here(grid: LevelGrid, call: AttentionCall, place: int) -> Partial:
    return _attend_to(call, _here(call), _columns(grid, call, place, here=True))


def _attend_to(call: AttentionCall, tokens: KeysValues, bias: Tensor | None) -> Partial:
    k_BNkD, v_BNkD = (x.transpose(1, 2) for x in tokens)
    return attend_locally(call.query, k_BNkD, v_BNkD, bias=bias, scale=call.scale)


def _attend_beside_tokens(
    share: LocalPatch, where: str, grid: LevelGrid, call: AttentionCall, slot: StaleEntry
) -> Tensor:
    """With a selection of everybody's tokens of the last step; ours leave for the next."""
    options, memory = share.treatment.context, share.memory
    assert isinstance(options, StaleKV)
    assert memory is not None
    if slot.state is None:
        slot.state = RemoteTokens(options, share.axis, grid, _here(call), joined_anew=share.treatment.published)
    state: RemoteTokens = slot.state
    state.arrived(slot.take())
    if share.fresh:
        others: dict[int, KeysValues] = {}
        result = _attend_now(share, where, grid, call, others)
        state.remember(_own(grid, call, share.place), others, continues=memory.continues)
        return result
    if not share.frozen:
        told = _tell(share, where, _own(grid, call, share.place), state)
        state.lead_on(share.ahead)
        send = memory.send if share.treatment.published else memory.send_at_once
        slot.coming = send(state.part(_own(grid, call, share.place)), where)
        if told:
            for place, fits in zip(share.axis.others, told.arriving(), strict=True):
                state.correct(place, fits)
    return state.attend(call, _here(call))


def _tell(share: LocalPatch, where: str, own: KeysValues, state: RemoteTokens) -> Work[Messages] | None:
    """How everybody's tokens have changed since the last step, if the treatment wants to know."""
    if not state.corrects:
        return None
    gather = AllGather(share.door, share.axis, "correction", where)
    return gather.start(state.told(own, share.ahead), state.specs_of_told)


def _attend_beside_partials(
    share: LocalPatch, where: str, grid: LevelGrid, call: AttentionCall, slot: StaleEntry
) -> Tensor:
    """With what is kept of the attention to others' tokens; this layer's turn to renew it comes now and then."""
    options, memory = share.treatment.context, share.memory
    assert isinstance(options, CachedPartials)
    assert memory is not None
    layer, memory.attentions = memory.attentions, memory.attentions + 1
    if slot.state is None:
        slot.state = RemotePartials(options.refresh, share.axis, grid)
    state: RemotePartials = slot.state

    def renewed(received: dict[int, list[Tensor]]) -> Partial:
        found = {place: KeysValues(*tensors) for place, tensors in received.items()}
        return merge_partials(
            _attend_to(call, tokens, _columns(grid, call, place, here=False)) for place, tokens in found.items()
        )

    ranks = share.axis.ranks
    if share.fresh:
        slot.drop()
        arriving = _gather(share, where, grid, _own(grid, call, share.place)).arriving()
        whole = dict(zip(share.axis.others, arriving, strict=True))
        state.kept = renewed(whole)
        if state.is_due(memory.evaluation + 1, layer):  # what its turn needs is here already
            slot.keep({ranks[place]: tensors for place, tensors in whole.items()}, slot.own)
    elif state.is_due(memory.evaluation, layer) and not share.frozen:
        received = slot.take()
        if received:
            state.kept = renewed({ranks.index(rank): tensors for rank, tensors in received.items()})
    if not share.fresh and state.is_due(memory.evaluation + 1, layer) and not share.frozen:
        slot.coming = memory.send_at_once(state.part(_own(grid, call, share.place)), where)
    return merge_partials([_attend_here(grid, call, share.place), state.remote]).out_BNlD


def _note_drift(share: LocalPatch, slot: StaleEntry, key_BlND: Tensor) -> None:
    """How far our keys have moved since the last step, from every sixteenth token."""
    assert share.memory is not None
    sample = key_BlND[:, ::DRIFT_STRIDE].to(torch.float32, copy=True)  # a view would keep all of it
    if slot.own is not None and slot.own.shape == sample.shape:
        share.memory.drift += torch.stack([(sample - slot.own).square().sum(), sample.square().sum()])
    slot.own = sample
