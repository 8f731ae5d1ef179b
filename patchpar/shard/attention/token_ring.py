"""TokenRing (Wang et al., arXiv:2412.20501): queries travel round the ring, partial results return to their owner.

In step s a rank holds the queries of the rank s before it. While it attends with them, it sends them on and returns the
results of step s-1 to their owner, so both directions of a link are used. The results of the last step are sent with no
compute to overlap. Tokens are sent before heads, as kernels read and write them.

sent by each rank       (N-1)/N of the sequence as queries, as much again as results, and their log-sum-exp
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.transport import TensorSpec, Work
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.partial import Partial, attend_own, attend_span, merge_partials
from patchpar.shard.attention.sharded_qkv import ShardedQKV


def attend_in_token_ring(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D]. Raises ExchangeError."""
    return merge_partials(_RingPass(comm, axis, where, shared).partials()).out_BNlD


class _RingPass:
    """One pass of the queries round the ring."""

    def __init__(self, comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> None:
        self.comm, self.axis, self.where, self.shared = comm, axis, where, shared

    def partials(self) -> Iterator[Partial]:
        """Yield attention of this rank's queries to each rank's keys, as it arrives."""
        shared, size = self.shared, self.axis.size
        queries = shared.q_BNlD[:, :, shared.asking :]
        common, made = self._common(), None
        for step in range(size):
            exchange = self._start(step, queries, made)
            if step == 0:
                yield attend_own(shared)
            else:
                made = self._attend(step, queries, common)
            received = exchange.wait() if exchange is not None else []
            for part in received[1:]:  # partial results; queries are the first part
                yield from self._home(part)
            if step < size - 1:
                queries = received[0][self._rank(-1)][0].transpose(1, 2)
        if made is not None:
            yield from self._home(self.comm.exchange(self.where, [self._results(size, made)]).wait()[0])

    def _rank(self, away: int) -> int:
        """Return the global rank `away` hops on."""
        return self.axis.ranks[(self.axis.rank + away) % self.axis.size]

    def _common(self) -> Partial | None:
        """Return attention of the common queries to this rank's own keys, the same in every step."""
        shared = self.shared
        if not shared.asking:
            return None
        return attend_span(shared, shared.q_BNlD[:, :, : shared.common], shared.common_span, *shared.own_keys)

    def _attend(self, step: int, queries: Tensor, common: Partial | None) -> Partial:
        """Return attention of the common queries and those of the rank `step` hops before to this rank's own keys."""
        shared = self.shared
        owner = (self.axis.rank - step) % self.axis.size
        found = attend_span(shared, queries, shared.span(owner), *shared.own_keys)
        if common is None:
            return found
        out_BlND = torch.cat([x.out_BNlD.transpose(1, 2) for x in (common, found)], 1)
        return Partial(out_BlND.transpose(1, 2), torch.cat([common.lse_BNl, found.lse_BNl], 2))

    def _start(self, step: int, queries: Tensor, made: Partial | None) -> Work[list[Received]] | None:
        """Send queries on and return the results of the previous step."""
        size, parts = self.axis.size, []
        if step < size - 1:
            owner = (self.axis.rank - 1 - step) % size
            batch, heads, _, width = queries.shape
            spec = TensorSpec((batch, self.shared.sizes[owner], heads, width), queries.dtype)
            sent = queries.transpose(1, 2).contiguous()
            parts.append(ExchangePart("q", [((self._rank(1),), (sent,))], {self._rank(-1): (spec,)}))
        elif made is not None:
            parts.append(ExchangePart("q", [], {}))
        if made is not None:
            parts.append(self._results(step, made))
        return self.comm.exchange(self.where, parts) if parts else None

    def _results(self, step: int, made: Partial) -> ExchangePart:
        """Send the results of the step before `step` to their owner, and receive those of this rank's queries."""
        away = step - 1
        batch, heads, asking, _ = self.shared.q_BNlD.shape
        out_BlND, lse_BNl = made.out_BNlD.transpose(1, 2), made.lse_BNl
        specs = (
            TensorSpec((batch, asking, heads, out_BlND.shape[3]), out_BlND.dtype),
            TensorSpec((batch, heads, asking), lse_BNl.dtype),
        )
        outgoing = ((self._rank(-away),), (out_BlND.contiguous(), lse_BNl.contiguous()))
        return ExchangePart("partials", [outgoing], {self._rank(away): specs})

    @staticmethod
    def _home(received: Received) -> Iterator[Partial]:
        for out, lse in received.values():
            yield Partial(out.transpose(1, 2), lse)
