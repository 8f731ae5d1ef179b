"""TokenRing (Wang et al., arXiv:2412.20501): keys and values stay, queries go round, partial results go straight home.

In step s a place holds the queries of the place s before it. They move on, and what was made of the last ones goes back
to its owner, while these are attended to; so both directions of a link work. The results of the last step go home with
nothing to hide behind.

sent by each place      (N-1)/N of the sequence as queries, as much again as results, and their log-sum-exp
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator, ExchangePart, Received
from patchpar.comm.transport import TensorSpec, Work
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.blockwise import attend_own, attend_span
from patchpar.shard.attention.partial import Partial, merge_partials
from patchpar.shard.attention.sharded_qkv import ShardedQKV


def attend_in_token_ring(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Output [B, N, c + l, D] of this place. Raises ExchangeError."""
    return merge_partials(_RingPass(comm, axis, where, shared).partials()).out_BNlD


class _RingPass:
    """One time round."""

    def __init__(self, comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> None:
        self.comm, self.axis, self.where, self.shared = comm, axis, where, shared

    def partials(self) -> Iterator[Partial]:
        """What own queries make of everybody's keys, as it comes home."""
        shared, size = self.shared, self.axis.size
        queries = shared.q_BNlD[:, :, shared.asking :].contiguous()
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
                queries = received[0][self._rank(-1)][0]
        if made is not None:
            yield from self._home(self.comm.exchange(self.where, [self._results(size, made)]).wait()[0])

    def _rank(self, away: int) -> int:
        """The global rank so many places on."""
        return self.axis.ranks[(self.axis.rank + away) % self.axis.size]

    def _common(self) -> Partial | None:
        """Common queries against our own keys: the same for whoever owns the others."""
        shared = self.shared
        if not shared.asking:
            return None
        return attend_span(shared, shared.q_BNlD[:, :, : shared.common], shared.common_span, *shared.own_keys)

    def _attend(self, step: int, queries: Tensor, common: Partial | None) -> Partial:
        """What our keys are to the queries of the place `step` before us, and to the common ones."""
        shared = self.shared
        owner = (self.axis.rank - step) % self.axis.size
        found = attend_span(shared, queries, shared.span(owner), *shared.own_keys)
        if common is None:
            return found
        return Partial(*(torch.cat(pair, 2) for pair in zip(common, found, strict=True)))

    def _start(self, step: int, queries: Tensor, made: Partial | None) -> Work[list[Received]] | None:
        """Queries move on, and the last step's results go home."""
        size, parts = self.axis.size, []
        if step < size - 1:
            owner = (self.axis.rank - 1 - step) % size
            spec = TensorSpec((*queries.shape[:2], self.shared.sizes[owner], queries.shape[3]), queries.dtype)
            parts.append(ExchangePart("q", [((self._rank(1),), (queries,))], {self._rank(-1): (spec,)}))
        elif made is not None:
            parts.append(ExchangePart("q", [], {}))
        if made is not None:
            parts.append(self._results(step, made))
        return self.comm.exchange(self.where, parts) if parts else None

    def _results(self, step: int, made: Partial) -> ExchangePart:
        """What was made in the step before `step` goes to its owner; what was made of our queries comes."""
        away = step - 1
        shape = self.shared.q_BNlD.shape
        out_shape = (*shape[:3], self.shared.v_BMlD.shape[3])
        specs = (TensorSpec(tuple(out_shape), made.out_BNlD.dtype), TensorSpec(tuple(shape[:3]), made.lse_BNl.dtype))
        outgoing = ((self._rank(-away),), (made.out_BNlD.contiguous(), made.lse_BNl.contiguous()))
        return ExchangePart("partials", [outgoing], {self._rank(away): specs})

    @staticmethod
    def _home(received: Received) -> Iterator[Partial]:
        for out, lse in received.values():
            yield Partial(out, lse)
