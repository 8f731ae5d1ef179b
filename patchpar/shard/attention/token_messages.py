"""Stale keys and values as messages: which tokens each rank gets of this one, and where those of the others come."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.transport import TensorSpec
from patchpar.plan.kv_selection import AllRows, PooledRows
from patchpar.shard.stale.quantized_delta import QuantizedDelta, decode_parts
from patchpar.shard.stale.stale_layout import StaleLayout
from patchpar.shard.stale.token_grid import take


class _Received(NamedTuple):
    """Where tokens come in `buffer`, by global rank: specs and memory. `whole`: see `ExchangePart`."""

    buffer: Tensor
    specs: Mapping[int, tuple[TensorSpec, ...]]
    into: Mapping[int, tuple[Tensor, ...]]
    whole: Tensor | None


class _Taken(NamedTuple):
    """Tokens `own` [l, 2, B, N, D] and what is sent of them, by receivers. `are_views`: the same in every step."""

    own: Tensor
    outgoing: list[tuple[tuple[int, ...], tuple[Tensor, ...]]]
    are_views: bool


class TokenMessages:
    """The exchange of tokens as they are, of one exchange point. A message has a tensor for each piece of tokens.

    `numbers`: what it needs of them on the device, where they come with `use`.
    """

    numbers: Sequence[int] = ()

    def __init__(self, layout: StaleLayout) -> None:
        self._layout, self._axis = layout, layout.axis
        self._to_all = layout.options.selection == AllRows()
        self._holds_own = layout.newest.counts[layout.axis.rank] > 0
        # What attention reads is used by other exchange points too. An operation of all ranks copies at once what it
        # sends, but where attended tokens are joined, small messages may wait for others.
        self._copies = not self._holds_own and (layout.joins or not layout.may_wait)
        self._received: _Received | None = None
        self._taken: _Taken | None = None

    def part(self, own: Tensor, newest: Tensor) -> ExchangePart:
        """Return what is sent of this rank's tokens `own` [l, 2, B, N, D], and received into `newest` [T, 2, B, N, D].

        `own` must not change meanwhile, unless attention reads other memory than what is received.
        """
        if self._taken is None or self._taken.own is not own:
            self._taken = self._take(own)
        if self._received is None or self._received.buffer is not newest:
            self._received = self._receiving(newest)
        _, specs, into, whole = self._received
        sent, self._taken = self._taken.outgoing, self._taken if self._taken.are_views else None
        return ExchangePart("kv", sent, specs, into, self._axis, self._to_all, at_once=True, whole=whole)

    def _take(self, own: Tensor) -> _Taken:
        outgoing = [
            (peers, tuple([self._message(own, piece) for piece in pieces]))
            for pieces, peers in self._layout.receivers.items()
        ]
        memory = own.untyped_storage()._cdata
        views = all(x.untyped_storage()._cdata == memory for _, tensors in outgoing for x in tensors)
        return _Taken(own, outgoing, are_views=views)

    def _receiving(self, newest: Tensor) -> _Received:
        layout, mine = self._layout, self._axis.rank
        into, specs = dict[int, tuple[Tensor, ...]](), dict[int, tuple[TensorSpec, ...]]()
        for p in self._axis.others:
            if not layout.attended.counts[p]:
                continue
            found, start = list[Tensor](), layout.newest.starts[p]
            for piece in layout.pieces(p, mine):
                found.append(newest.narrow(0, start, piece.num_tokens(layout.grid.across)))
                start += found[-1].shape[0]
            into[self._axis.ranks[p]] = tuple(found)
            specs[self._axis.ranks[p]] = tuple(map(TensorSpec.of, found))
        return _Received(newest, specs, into, None if self._holds_own else newest)

    def _message(self, own: Tensor, piece: PooledRows) -> Tensor:
        taken = take(own, (piece,), self._layout.grid)
        return taken.clone() if self._copies and piece.pool == 1 else taken

    def use(self, numbers: Tensor) -> None:
        """Take the `numbers` [...], on the device."""

    def store(self, fresh: Tensor, newest: Tensor) -> None:
        """Write what others would send of `fresh` [T, 2, B, N, D], tokens of all ranks, to `newest` [...] likewise."""
        layout = self._layout
        for group_rank in self._axis.others:
            if pieces := layout.pieces(group_rank, self._axis.rank):
                tokens = take(layout.fresh.of(fresh, group_rank), pieces, layout.grid)
                layout.newest.of(newest, group_rank).copy_(tokens)

    def remember(self, own: Tensor) -> None:
        """Know that the receivers have what they get of tokens `own` [l, 2, B, N, D]."""

    def arrived(self, received: Received, newest: Tensor) -> None:
        """Make what has come the newest tokens [T, 2, B, N, D]; tokens as they are come there themselves."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor, of any shape, that is stored for the next step."""
        return iter(())


class DeltaMessages(TokenMessages):
    """The exchange of quantised differences, by messages of their own. See `shard.stale.quantized_delta`."""

    def __init__(self, layout: StaleLayout) -> None:
        super().__init__(layout)
        self._bits = layout.options.bits
        self._deltas: dict[tuple[PooledRows, ...], QuantizedDelta] = {}  # others' copies of own tokens, by pieces

    def part(self, own: Tensor, newest: Tensor) -> ExchangePart:
        """Return what is sent of the difference of this rank's tokens `own` [l, 2, B, N, D], and received.

        `newest` [T, 2, B, N, D]: the copies of the others' tokens.
        """
        layout, ranks = self._layout, self._axis.ranks
        outgoing = [
            (peers, self._deltas[pieces].encode(take(own, pieces, layout.grid)))
            for pieces, peers in layout.receivers.items()
        ]
        senders = [p for p in self._axis.others if layout.attended.counts[p]]
        specs = {ranks[p]: QuantizedDelta(layout.newest.of(newest, p), self._bits).specs() for p in senders}
        return ExchangePart("kv", outgoing, specs, axis=self._axis, to_all=self._to_all)

    def remember(self, own: Tensor) -> None:
        """See TokenMessages; `own` [l, 2, B, N, D]."""
        for pieces in self._layout.receivers:
            tokens = take(own, pieces, self._layout.grid)
            if pieces not in self._deltas:
                self._deltas[pieces] = QuantizedDelta(tokens.clone(), self._bits)
            self._deltas[pieces].copy.copy_(tokens)

    def arrived(self, received: Received, newest: Tensor) -> None:
        """Add differences, levels and scales by global rank, to the copies `newest` [T, 2, B, N, D]."""
        starts, ranks = self._layout.newest.starts, self._axis.ranks
        found = [(starts[p], received[ranks[p]]) for p in self._axis.others if received.get(ranks[p])]
        decode_parts(newest, found, self._bits)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor [k, 2, B, N, D] that is stored for the next step."""
        yield from (delta.copy for delta in self._deltas.values())
