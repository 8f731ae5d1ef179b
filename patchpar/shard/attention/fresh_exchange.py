"""What attention to stale tokens exchanges in the step that reads them: corrections, and text that is split."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather
from patchpar.comm.exchange_part import ExchangePart, collectives_of
from patchpar.comm.transport import Work
from patchpar.shard.attention.stale_kv import RemoteTokens
from patchpar.shard.attention.token_buffer import fresh_part
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.stale.token_slots import TokenSlots


def fits_with_text(
    patch: LocalPatch, where: str, attended: Tensor, state: RemoteTokens, tokens: Work[Any] | None = None
) -> Tensor | Sequence[Tensor] | None:
    """Return the corrections of all ranks, [2, B, N, numbers] of each; None where the policy needs none.

    Text that is split is gathered in `attended` [tokens, 2, B, N, D], which attention reads, in the same message to
    each rank; where ranks gather in one operation these are two, which need no copies. `tokens`: the exchange of stale
    ones, which is awaited here, too: all of these by one wait, where the transport can. Raises ExchangeError.
    """
    axis, text = patch.axis, state.layout.text
    if text is not None and state.corrects and collectives_of(patch.comm.transport, axis.ranks) is None:
        assert tokens is None, "they are sent late where ranks have operations of all of them"
        return _in_one_message(patch, where, attended, state, text)
    started = [] if tokens is None else [tokens]
    if text is not None:
        started.append(_text_of_all(patch, where, attended, state, text))
    if state.corrects:
        started.append(_fits_of_all(patch, where, attended, state))
    if not started:
        return None
    last = started.pop()
    for each in started:
        last.beside(each)
    found: Tensor | Sequence[Tensor] = last.wait()
    return found if state.corrects else None


def _in_one_message(
    patch: LocalPatch, where: str, attended: Tensor, state: RemoteTokens, text: TokenSlots
) -> Tensor | Sequence[Tensor]:
    axis, part = patch.axis, fresh_part(patch.axis, text, attended, "text")
    own, peers = state.fit(attended, patch.step_ratio), axis.other_ranks
    specs = {axis.ranks[p]: (state.fit_specs[p],) for p in axis.others}
    correction = ExchangePart("correction", [(peers, (own,))], specs, axis=axis, to_all=True)
    _, found = patch.comm.exchange(where, [part, correction]).wait()
    all_fits = [own if rank not in found else found[rank][0] for rank in axis.ranks]
    return torch.stack(all_fits) if state.fits_are_equal else all_fits


def _text_of_all(patch: LocalPatch, where: str, attended: Tensor, state: RemoteTokens, text: TokenSlots) -> Work[Any]:
    """Start to gather the text in `attended` [tokens, 2, B, N, D]."""
    rows = state.text_rows(attended)
    if rows is None:
        return patch.comm.exchange(where, [fresh_part(patch.axis, text, attended, "text")])
    of_all, own = rows
    return patch.comm.all_gather(patch.axis, "text", where, own, into=of_all)


def _fits_of_all(patch: LocalPatch, where: str, attended: Tensor, state: RemoteTokens) -> Work[Any]:
    """Start to gather the corrections, [2, B, N, numbers] of each rank."""
    rows = None if patch.cache is None else state.fit_rows(patch.cache.fits)
    if rows is not None:
        state.fit(attended, patch.step_ratio, rows[1])
        return patch.comm.all_gather(patch.axis, "correction", where, rows[1], into=rows[0])
    own = state.fit(attended, patch.step_ratio)
    if state.fits_are_equal:
        return patch.comm.all_gather(patch.axis, "correction", where, own)
    gather = AllGather(patch.comm, patch.axis, "correction", where)
    pending = gather.start([own], lambda group_rank: [state.fit_specs[group_rank]])
    return pending.then(lambda found: [fit for (fit,) in found])
