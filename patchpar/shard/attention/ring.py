"""Ring attention (Liu et al., arXiv:2310.01889): keys and values travel round a ring in one or both directions.

    one way      N-1 rounds, each rank sends on what it received
    both ways    N/2 rounds: keys and values go half-way round in each direction and use both directions of a link

The next round is sent while this round's keys are attended to.

sent by each rank       2 (N-1)/N of the sequence, to the neighbours
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Incoming, Messages, Outgoing, Work
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.partial import Partial, attend_others, attend_own, merge_partials
from patchpar.shard.attention.sharded_qkv import ShardedQKV


class RingShift(NamedTuple):
    """Keys and values that travel `hops` hops round the ring, each to the rank `direction` away."""

    direction: int
    hops: int


def attend_in_ring(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D]. Raises ExchangeError."""
    return _attend(comm, axis, where, shared, [RingShift(1, axis.size - 1)])


def attend_both_ways(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D]. Raises ExchangeError."""
    streams = [RingShift(1, axis.size // 2), RingShift(-1, (axis.size - 1) // 2)]
    return _attend(comm, axis, where, shared, streams)


def _attend(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV, streams: Sequence[RingShift]) -> Tensor:
    def partials() -> Iterator[Partial]:
        own = shared.stacked_keys()
        held = dict.fromkeys(streams, own)
        rounds = max(stream.hops for stream in streams)
        pending = _pass_on(comm, axis, where, shared, held, 1) if rounds else None
        yield attend_own(shared)
        for step in range(1, rounds + 1):
            assert pending is not None
            live = [stream for stream in streams if step <= stream.hops]
            held = {stream: stacked for stream, (stacked,) in zip(live, pending.wait(), strict=True)}
            if step < rounds:
                pending = _pass_on(comm, axis, where, shared, held, step + 1)
            for stream in live:
                yield attend_others(shared, _owner(axis, stream, step), held[stream])

    return merge_partials(partials()).out_BNlD


def _owner(axis: Axis, stream: RingShift, step: int) -> int:
    """Return the group rank whose keys arrive in this round."""
    return (axis.rank - stream.direction * step) % axis.size


def _pass_on(
    comm: Communicator, axis: Axis, where: str, shared: ShardedQKV, held: dict[RingShift, Tensor], step: int
) -> Work[Messages]:
    """Start the round `step`: send on the keys and values [2, B, M, k, D] of each stream."""
    outgoing, incoming = [], []
    for stream, stacked in held.items():
        if step <= stream.hops:
            ahead, behind = ((axis.rank + way * stream.direction) % axis.size for way in (1, -1))
            outgoing.append(Outgoing((axis.ranks[ahead],), (stacked,)))
            incoming.append(Incoming(axis.ranks[behind], (shared.stacked_spec(_owner(axis, stream, step)),)))
    return comm.send_recv("kv", where, outgoing, incoming)
