"""Own queries against own keys of this step and what is held of other places' keys of the last one.

    exact call    everybody's keys come now, and are remembered
    else          what is held is attended to, while ours leave for the next step

For bands of pictures and for runs of tokens alike. Tokens that every place has (text, in joint attention) are always of
this step.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather
from patchpar.comm.transport import Messages, TensorSpec, Work
from patchpar.plan.exchange_policy import CachedPartials, StaleKV
from patchpar.shard.attention.blockwise import attend_locally
from patchpar.shard.attention.partial import Partial, merge_partials
from patchpar.shard.attention.stale_kv import KeysValues, RemotePartials, RemoteTokens
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.stale.cache import StaleEntry
from patchpar.shard.stale.token_grid import LevelGrid

DRIFT_STRIDE = 16  # tokens


class StaleAttentionCall(NamedTuple):
    """One attention call: queries [B, N, q, D], the keys and values that are here, and the factor on logits.

    `here`: `common` tokens that everybody has, then ours. `bias`: what is added to the logits, or None, with a column
    for every common token, then every token of the whole in their order. `kernel`: the user's own, called on all keys
    at once where they lie together.
    """

    query: Tensor
    here: KeysValues
    scale: float | None
    common: int = 0
    bias: Tensor | None = None
    kernel: Callable[..., Tensor] | None = None

    @property
    def own(self) -> KeysValues:
        """Our tokens alone."""
        if not self.common:
            return self.here
        k_BlND, v_BlND = (x[:, self.common :] for x in self.here)
        return KeysValues(k_BlND, v_BlND)

    def bias_of(self, grid: LevelGrid, place: int, *, here: bool) -> Tensor | None:
        """Columns of one place, and with `here` of the common tokens too."""
        if self.bias is None or self.bias.shape[-1] == 1:
            return self.bias
        columns = self.bias.narrow(-1, self.common + grid.start(place), grid.num_tokens(place))
        return torch.cat([self.bias[..., : self.common], columns], dim=-1) if here and self.common else columns


def attend_with_past(
    share: LocalPatch, where: str, grid: LevelGrid, asked: StaleAttentionCall, slot: StaleEntry
) -> Tensor:
    """Output [B, N, q, D] of our queries. Raises ExchangeError."""
    if share.treatment.resync is not None:
        _note_drift(share, slot, asked.own.k_BlND)
    if isinstance(share.treatment.context, CachedPartials):
        return _attend_beside_partials(share, where, grid, asked, slot)
    return _attend_beside_tokens(share, where, grid, asked, slot)


def _attend_now(
    share: LocalPatch, where: str, grid: LevelGrid, asked: StaleAttentionCall, others: dict[int, KeysValues]
) -> Tensor:
    """With everybody's keys of this step, which are left in `others` for the next."""
    pending = _gather(share, where, grid, asked.own)

    def partials() -> Iterator[Partial]:
        yield _attend_here(grid, asked, share.place)
        for place, tensors in zip(share.axis.others, pending.arriving(), strict=True):
            others[place] = KeysValues(*tensors)
            yield _attend_to(asked, others[place], asked.bias_of(grid, place, here=False))

    return merge_partials(partials()).out_BNlD


def _gather(share: LocalPatch, where: str, grid: LevelGrid, own: KeysValues) -> Work[Messages]:
    batch, _, heads, _ = own.k_BlND.shape

    def specs(place: int) -> list[TensorSpec]:
        return [TensorSpec((batch, grid.num_tokens(place), heads, x.shape[-1]), x.dtype) for x in own]

    return AllGather(share.door, share.axis, "kv", where).start(own, specs)


def _attend_here(grid: LevelGrid, asked: StaleAttentionCall, place: int) -> Partial:
    return _attend_to(asked, asked.here, asked.bias_of(grid, place, here=True))


def _attend_to(asked: StaleAttentionCall, tokens: KeysValues, bias: Tensor | None) -> Partial:
    k_BNkD, v_BNkD = (x.transpose(1, 2) for x in tokens)
    return attend_locally(asked.query, k_BNkD, v_BNkD, bias=bias, scale=asked.scale)


def _attend_beside_tokens(
    share: LocalPatch, where: str, grid: LevelGrid, asked: StaleAttentionCall, slot: StaleEntry
) -> Tensor:
    """With a selection of everybody's tokens of the last step; ours leave for the next."""
    options, memory = share.treatment.context, share.memory
    assert isinstance(options, StaleKV)
    assert memory is not None
    if slot.state is None:
        slot.state = RemoteTokens(options, share.axis, grid, asked.here, joined_anew=share.treatment.published)
    state: RemoteTokens = slot.state
    state.arrived(slot.take())
    if share.fresh:
        others: dict[int, KeysValues] = {}
        result = _attend_now(share, where, grid, asked, others)
        state.remember(asked.own, others, continues=memory.continues)
        return result
    if not share.frozen:
        told = _tell(share, where, asked.own, state)
        state.lead_on(share.ahead)
        send = memory.send if share.treatment.published else memory.send_at_once
        slot.coming = send(state.part(asked.own), where)
        if told:
            for place, fits in zip(share.axis.others, told.arriving(), strict=True):
                state.correct(place, fits)
    return state.attend(asked.query, asked.here, asked.scale, asked.bias, asked.kernel)


def _tell(share: LocalPatch, where: str, own: KeysValues, state: RemoteTokens) -> Work[Messages] | None:
    """How everybody's tokens have changed since the last step, if the treatment wants to know."""
    if not state.corrects:
        return None
    gather = AllGather(share.door, share.axis, "correction", where)
    return gather.start(state.told(own, share.ahead), state.specs_of_told)


def _attend_beside_partials(
    share: LocalPatch, where: str, grid: LevelGrid, asked: StaleAttentionCall, slot: StaleEntry
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
            _attend_to(asked, tokens, asked.bias_of(grid, place, here=False)) for place, tokens in found.items()
        )

    ranks = share.axis.ranks
    if share.fresh:
        slot.drop()
        arriving = _gather(share, where, grid, asked.own).arriving()
        whole = dict(zip(share.axis.others, arriving, strict=True))
        state.kept = renewed(whole)
        if state.is_due(memory.evaluation + 1, layer):  # what its turn needs is here already
            slot.keep({ranks[place]: tensors for place, tensors in whole.items()}, slot.own)
    elif state.is_due(memory.evaluation, layer) and not share.frozen:
        received = slot.take()
        if received:
            state.kept = renewed({ranks.index(rank): tensors for rank, tensors in received.items()})
    if not share.fresh and state.is_due(memory.evaluation + 1, layer) and not share.frozen:
        slot.coming = memory.send_at_once(state.part(asked.own), where)
    return merge_partials([_attend_here(grid, asked, share.place), state.remote]).out_BNlD


def _note_drift(share: LocalPatch, slot: StaleEntry, key_BlND: Tensor) -> None:
    """How far our keys have moved since the last step, from every sixteenth token."""
    assert share.memory is not None
    sample = key_BlND[:, ::DRIFT_STRIDE].to(torch.float32, copy=True)  # a view would keep all of it
    if slot.own is not None and slot.own.shape == sample.shape:
        share.memory.drift += torch.stack([(sample - slot.own).square().sum(), sample.square().sum()])
    slot.own = sample
