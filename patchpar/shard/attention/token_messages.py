"""Stale keys and values as messages: which tokens each rank gets of this one, and where those of the others come."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart
from patchpar.comm.transport import TensorSpec
from patchpar.plan.kv_selection import AllRows, PooledRows
from patchpar.shard.stale.stale_layout import StaleLayout
from patchpar.shard.stale.token_grid import take


class _Received(NamedTuple):
    """Where tokens come in `buffer`, by global rank: specs and memory. `whole`: see `ExchangePart`."""

    buffer: Tensor
    specs: Mapping[int, tuple[TensorSpec, ...]]
    into: Mapping[int, tuple[Tensor, ...]]
    whole: Tensor | None


class TokenMessages:
    """The exchange of tokens as they are, of one exchange point. A message has a tensor for each piece of tokens."""

    def __init__(self, layout: StaleLayout) -> None:
        self._layout, self._axis = layout, layout.axis
        self._to_all = layout.options.selection == AllRows()
        self._holds_own = layout.newest.counts[layout.axis.rank] > 0
        # What attention reads is used by other exchange points too. An operation of all ranks copies at once what it
        # sends, but where attended tokens are joined, small messages may wait for others.
        self._copies = not self._holds_own and (layout.joins or not layout.may_wait)
        self._received: _Received | None = None

    def part(self, own: Tensor, newest: Tensor) -> ExchangePart:
        """Return what is sent of this rank's tokens `own` [l, 2, B, N, D], and received into `newest` [T, 2, B, N, D].

        `own` must not change meanwhile, unless attention reads other memory than what is received.
        """
        outgoing = [
            (peers, tuple([self._message(own, piece) for piece in pieces]))
            for pieces, peers in self._layout.receivers.items()
        ]
        if self._received is None or self._received.buffer is not newest:
            self._received = self._receiving(newest)
        _, specs, into, whole = self._received
        return ExchangePart("kv", outgoing, specs, into, self._axis, self._to_all, at_once=True, whole=whole)

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
