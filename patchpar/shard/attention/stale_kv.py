"""Stale keys and values of the other ranks, for attention beside this rank's fresh ones.

    RemoteTokens      selected tokens of all ranks in one buffer, one attention over all of it
    RemotePartials    attention to the other ranks' tokens, cached as output and log-sum-exp, refreshed every few steps

Each belongs to one attention exchange point in one guidance call.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart
from patchpar.comm.transport import TensorSpec
from patchpar.plan.exchange_policy import StaleKV
from patchpar.plan.kv_selection import AllRows, PooledRows
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.partial import Partial
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.correction import CorrectionFit, OwnPast, correct, on_the_line
from patchpar.shard.stale.quantized_delta import QuantizedDelta
from patchpar.shard.stale.token_grid import LevelGrid, log_weights, take, take_bias


class KeysValues(NamedTuple):
    """Keys and values of some tokens, [B, l, N, D] each, in the memory layout of the projections."""

    k_BlND: Tensor
    v_BlND: Tensor


class RemoteTokens:
    """The other ranks' selected stale tokens beside this rank's own in one buffer, allocated once.

    `joined_anew`: concatenate keys and values for each attention, as DistriFusion's code does (arXiv:2402.19481).
    """

    def __init__(self, options: StaleKV, axis: Axis, grid: LevelGrid, here: KeysValues, *, joined_anew: bool) -> None:
        self.options, self.axis, self.grid, self.joined_anew = options, axis, grid, joined_anew
        sizes = [self._num_tokens(group_rank, axis.rank) for group_rank in range(axis.size)]
        sizes[axis.rank] = here.k_BlND.shape[1]
        self._common = sizes[axis.rank] - grid.num_tokens(axis.rank)
        order = (axis.rank, *axis.others)  # own tokens first; attention does not depend on the order of keys
        batch, _, heads, _ = here.k_BlND.shape
        self._buffers = tuple(x.new_empty(batch, sum(sizes), heads, x.shape[-1]) for x in here)
        ends = accumulate(sizes[group_rank] for group_rank in order)
        self._range = {
            group_rank: (end - sizes[group_rank], sizes[group_rank])
            for group_rank, end in zip(order, ends, strict=True)
        }
        self._deltas: dict[tuple[PooledRows, ...], list[QuantizedDelta]] = {}  # others' copies of own tokens, by pieces
        self._copies: dict[int, list[QuantizedDelta]] = {}  # own copies of the others' tokens
        self._bias = self._make_bias(order)
        self._ended = {p: tuple(x.clone() for x in self._held(p)) for p in axis.others if options.extrapolated}
        self._past = OwnPast(options.correction, extrapolated=options.extrapolated)
        self._two_known = False  # whether `_ended` is of the evaluation before that of the buffer
        self._held_is_newest = False  # whether the buffer has values as received, not extrapolated

    def _pieces(self, sender: int, receiver: int) -> tuple[PooledRows, ...]:
        return self.options.selection.pieces(sender, receiver, self.grid.rows(sender))

    def _num_tokens(self, sender: int, receiver: int) -> int:
        return sum(piece.num_tokens(self.grid.across) for piece in self._pieces(sender, receiver))

    def _make_bias(self, order: Sequence[int]) -> Tensor | None:
        """Return the logit bias of every token in the buffer; None where none is an average."""
        mine = self.axis.rank
        pieces = [(PooledRows(0, self.grid.rows(mine)),) if p == mine else self._pieces(p, mine) for p in order]
        if all(piece.pool == 1 for each in pieces for piece in each):
            return None
        bias = torch.cat([log_weights(each, self.grid.across) for each in pieces])
        bias = torch.cat([bias.new_zeros(self._common), bias])
        buffer = self._buffers[0]
        return bias.to(buffer.device, buffer.dtype)

    def _held(self, group_rank: int) -> list[Tensor]:
        """Return views of the tokens of a rank in the buffers."""
        start, count = self._range[group_rank]
        return [buffer.narrow(1, start, count) for buffer in self._buffers]

    def remember(self, own: KeysValues, others: Mapping[int, KeysValues], *, continues: bool) -> None:
        """Store the fresh tokens of all ranks. `continues`: the step before belongs to the same image."""
        self._past.remember(own, continues=continues)
        self._two_known = continues and self._held_is_newest
        self._held_is_newest = True
        for group_rank, ended in self._ended.items():
            if self._two_known:
                _copy(ended, self._held(group_rank))
        for group_rank, whole in others.items():
            if not self._range[group_rank][1]:
                continue
            for held, x in zip(self._held(group_rank), whole, strict=True):
                held.copy_(take(x, self._pieces(group_rank, self.axis.rank), self.grid))
        if self.options.bits < 16:
            for pieces in self._receivers():
                self._deltas[pieces] = [
                    QuantizedDelta(take(x, pieces, self.grid).clone(), self.options.bits) for x in own
                ]
            self._copies = {
                group_rank: [QuantizedDelta(x, self.options.bits) for x in self._received(group_rank)]
                for group_rank in others
            }

    def _received(self, group_rank: int) -> list[Tensor]:
        """Return the tensors that sum up differences: the buffer's, or copies if the buffer holds derived values."""
        return [x.clone() if self._is_apart else x for x in self._held(group_rank)]

    @property
    def _is_apart(self) -> bool:
        """Whether the tokens attended to are derived from the received ones."""
        return bool(self._ended) or self.options.correction != "none"

    def _receivers(self) -> dict[tuple[PooledRows, ...], tuple[int, ...]]:
        """Return the global ranks that receive the same pieces of this rank's tokens, by pieces."""
        found: dict[tuple[PooledRows, ...], tuple[int, ...]] = {}
        for group_rank in self.axis.others:
            pieces = self._pieces(self.axis.rank, group_rank)
            if pieces:
                found[pieces] = (*found.get(pieces, ()), self.axis.ranks[group_rank])
        return found

    def part(self, own: KeysValues) -> ExchangePart:
        """Return what this rank sends and receives for the next step."""
        senders = [group_rank for group_rank in self.axis.others if self._range[group_rank][1]]
        to_all = isinstance(self.options.selection, AllRows)
        if self.options.bits < 16:
            outgoing = [(peers, self._encoded(own, pieces)) for pieces, peers in self._receivers().items()]
            specs = {self.axis.ranks[p]: tuple(s for r in self._copies[p] for s in r.specs()) for p in senders}
            return ExchangePart("kv", outgoing, specs, axis=self.axis, to_all=to_all)
        outgoing = [
            (peers, tuple(take(x, pieces, self.grid) for x in own)) for pieces, peers in self._receivers().items()
        ]
        into = {self.axis.ranks[group_rank]: tuple(self._held(group_rank)) for group_rank in senders}
        specs = {rank: tuple(TensorSpec.of(x) for x in held) for rank, held in into.items()}
        return ExchangePart("kv", outgoing, specs, into, self.axis, to_all)

    def _encoded(self, own: KeysValues, pieces: tuple[PooledRows, ...]) -> tuple[Tensor, ...]:
        tokens = [take(x, pieces, self.grid) for x in own]
        return tuple(t for x, r in zip(tokens, self._deltas[pieces], strict=True) for t in r.encode(x))

    def arrived(self, received: Mapping[int, list[Tensor]]) -> None:
        """Apply received differences, levels and scales by global rank as in `QuantizedDelta`, of any shape.

        Unquantised tokens are received into the buffer itself.
        """
        for group_rank, deltas in self._copies.items():
            found = received.get(self.axis.ranks[group_rank], [])
            for index, delta in enumerate(deltas if found else []):
                delta.decode(found[2 * index : 2 * index + 2])
            if found and self._is_apart:
                _copy(self._held(group_rank), [delta.copy for delta in deltas])
        self._held_is_newest = self._held_is_newest or bool(received)

    def extrapolate(self, step_ratio: Tensor | float) -> None:
        """Extrapolate the tokens in the buffer [B, l, N, D] along the line through the last two steps.

        `step_ratio`: length of this step over that of the last, a scalar. Call it once for each step; with one step
        known it changes nothing.
        """
        if not (self._ended and self._held_is_newest):
            return
        for group_rank, ended in self._ended.items():
            self._ended[group_rank] = tuple(held.clone() for held in self._held(group_rank))
            if self._two_known:
                for before, newest, held in zip(ended, self._ended[group_rank], self._held(group_rank), strict=True):
                    on_the_line(before, newest, step_ratio, into=held)
        self._two_known, self._held_is_newest = True, False

    @property
    def corrects(self) -> bool:
        """Whether ranks send corrections of their tokens."""
        return self.options.correction != "none"

    def gathered(self, own: KeysValues, step_ratio: Tensor | float) -> list[Tensor]:
        """Return the correction of this rank's tokens [B, l, N, D] to send, as `OwnPast.fits`.

        Call it once for each step, before `extrapolate`. `step_ratio` is a scalar.
        """
        return self._past.fits(own, step_ratio)

    def correction_specs(self, group_rank: int) -> list[TensorSpec]:
        """Return the specs of the correction that a rank sends."""
        count = self.grid.num_tokens(group_rank)
        return self._past.specs([(x.shape[0], count, *x.shape[2:]) for x in self._buffers])

    def correct(self, group_rank: int, gathered: Sequence[Tensor]) -> None:
        """Correct the tokens held of a rank by its fits of keys and values, as `OwnPast.fits` returns them.

        For each: `along` [B, N], `scale` [B, N, D] or [B, N, D, D], `shift` [B, N, D].
        """
        held = self._held(group_rank)
        fits = (CorrectionFit(*gathered[:3]), CorrectionFit(*gathered[3:]))
        for x, last, fit in zip(held, self._ended.get(group_rank, held), fits, strict=True):
            correct(x, last, fit)

    def attend(self, call: AttentionCall, here: KeysValues) -> Tensor:
        """Return attention [B, N, q, D] of the call's queries to the tokens in the buffer and the local fresh ones."""
        if self.options.narrow_to is not None or self.joined_anew:
            keys, values = self._joined(here)
        else:
            for held, x in zip(self._held(self.axis.rank), here, strict=True):
                held.copy_(x)
            keys, values = self._buffers
        query, bias = call.query, call.attn_mask
        mask = None if self._bias is None else self._bias.expand(1, 1, query.shape[2], -1)
        if bias is not None:
            mask = self._bias_of(bias) if bias.shape[-1] > 1 else bias if mask is None else mask + bias
        key, value = keys.transpose(1, 2), values.transpose(1, 2)
        gqa = query.shape[1] != key.shape[1]
        return replace(call, key=key, value=value, attn_mask=mask, enable_gqa=gqa).run()

    def _bias_of(self, bias: Tensor) -> Tensor:
        """Return the columns, common tokens and then rank by rank, for the tokens attended to, averages weighted."""
        mine, grid = self.axis.rank, self.grid

        def columns(group_rank: int) -> Tensor:
            return bias.narrow(-1, self._common + grid.start(group_rank), grid.num_tokens(group_rank))

        found = [bias[..., : self._common], columns(mine)]
        selection = self.options.narrow_to or self.options.selection
        for group_rank in self.axis.others:
            pieces = selection.pieces(group_rank, mine, grid.rows(group_rank))
            found += [take_bias(columns(group_rank), pieces, grid)] if pieces else []
        return torch.cat(found, dim=-1)

    def _joined(self, own: KeysValues) -> tuple[Tensor, ...]:
        """Return keys and values of all ranks, of the others only the selection attended to."""
        narrow = self.options.narrow_to or AllRows()
        mine, joined = self.axis.rank, []
        for index, x in enumerate(own):
            found = [x]
            for group_rank in self.axis.others:
                pieces = (
                    narrow.pieces(group_rank, mine, self.grid.rows(group_rank)) if self._range[group_rank][1] else ()
                )
                if pieces:
                    found.append(take(self._held(group_rank)[index], pieces, self.grid))
            joined.append(torch.cat(found, dim=1))
        return tuple(joined)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor stored for the next step, of any shape."""
        yield from self._buffers
        yield from self._past.tensors()
        yield from (x for ended in self._ended.values() for x in ended)
        for deltas in (*self._deltas.values(), *self._copies.values()):
            yield from (delta.copy for delta in deltas)
        if self._bias is not None:
            yield self._bias


def _copy(into: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for x, value in zip(into, values, strict=True):
        x.copy_(value)


class RemotePartials:
    """Attention of this rank's queries to all other ranks' tokens, as of the last refresh.

    Attention over parts of the keys merges exactly by log-sum-exp (ring attention, arXiv:2310.01889); here the remote
    part may be several steps old. DiTFastAttn (NeurIPS 2024) caches attention outside a window like this, on one GPU.
    """

    def __init__(self, refresh: int, axis: Axis, grid: LevelGrid) -> None:
        self.refresh, self.axis, self.grid = refresh, axis, grid
        self.kept: Partial | None = None

    def is_due(self, evaluation: int, layer: int) -> bool:
        """Whether this layer is refreshed in this evaluation."""
        return (evaluation + layer) % self.refresh == 0

    @property
    def remote(self) -> Partial:
        """The cached partial."""
        assert self.kept is not None, "a layer is refreshed in the first, synchronous step"
        return self.kept

    def part(self, own: KeysValues) -> ExchangePart:
        """Return what this rank sends and receives for a refresh in the next step."""
        ranks = self.axis.ranks
        batch, _, heads, _ = own.k_BlND.shape

        def specs(group_rank: int) -> tuple[TensorSpec, ...]:
            return tuple(
                TensorSpec((batch, self.grid.num_tokens(group_rank), heads, x.shape[-1]), x.dtype) for x in own
            )

        peers = tuple(ranks[group_rank] for group_rank in self.axis.others)
        incoming = {ranks[group_rank]: specs(group_rank) for group_rank in self.axis.others}
        return ExchangePart("kv", [(peers, tuple(own))], incoming, axis=self.axis, to_all=True)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the cached output [B, N, l, D] and log-sum-exp [B, N, l]."""
        if self.kept is not None:
            yield from self.kept
