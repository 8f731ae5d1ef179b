"""Ring attention (Liu et al., arXiv:2310.01889): keys and values travel round a ring in one or both directions.

    one way      N-1 rounds, each rank sends on what it received
    both ways    N/2 rounds: keys and values go half-way round in each direction and use both directions of a link

The next round is sent while this round's keys are attended to. Where ranks have operations of all of them, a round of
the ring one way is one, in which each rank sends to one other: messages of their own take longer to begin.

sent by each rank       2 (N-1)/N of the sequence, to the neighbours
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import collectives_of
from patchpar.comm.transport import FlatParts, Incoming, Messages, Outgoing, Work
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.partial import Partial, attend_others, attend_own, merge_partials
from patchpar.shard.attention.sharded_qkv import ShardedQKV


class RingShift(NamedTuple):
    """Keys and values that travel `hops` hops round the ring, each to the rank `direction` away."""

    direction: int
    hops: int


def attend_in_ring(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D]. Raises ExchangeError."""
    if collectives_of(comm.transport, axis.ranks) is not None:
        return merge_partials(_in_rounds(comm, axis, where, shared)).out_BNlD
    return _attend(comm, axis, where, shared, [RingShift(1, axis.size - 1)])


def attend_both_ways(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D]. Raises ExchangeError."""
    streams = [RingShift(1, axis.size // 2), RingShift(-1, (axis.size - 1) // 2)]
    return _attend(comm, axis, where, shared, streams)


class _Round(NamedTuple):
    """A round of the ring one way: elements sent to each rank and received from each, keys and values of `owner`."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    owner: int


@lru_cache(maxsize=1024)  # every attention layer asks, in every call
def _rounds(axis: Axis, sizes: tuple[int, ...], token: int) -> tuple[_Round, ...]:
    """Return all rounds of ranks with so many tokens, of `token` elements each."""

    def part(peer: int, owner: int) -> tuple[int, ...]:
        return tuple(sizes[owner] * token if p == peer % axis.size else 0 for p in range(axis.size))

    owners = [(axis.rank - step) % axis.size for step in range(axis.size)]
    return tuple(
        _Round(part(axis.rank + 1, before), part(axis.rank - 1, owner), owner) for before, owner in pairwise(owners)
    )


def _in_rounds(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Iterator[Partial]:
    """Yield attention to this rank's keys, and to those of each round of the ring one way. Raises ExchangeError."""
    batch, heads, _, width = shared.k_BMlD.shape
    rounds = _rounds(axis, shared.sizes, 2 * batch * heads * width)
    own = shared.stacked_keys()
    pending = _shift(comm, axis, where, own, rounds[0]) if rounds else None
    yield attend_own(shared)
    for number, (_, _, owner) in enumerate(rounds, 1):
        assert pending is not None
        held = pending.wait()
        if number < len(rounds):
            pending = _shift(comm, axis, where, held, rounds[number])
        yield attend_others(shared, owner, held.view(2, batch, heads, shared.sizes[owner], width))


def _shift(comm: Communicator, axis: Axis, where: str, held: Tensor, turn: _Round) -> Work[Tensor]:
    """Start a round: send on what is `held`, of any shape. The result of the Work: keys and values [elements]."""
    received = FlatParts(held.new_empty(sum(turn.received)), turn.received)
    return comm.all_to_all(axis, "kv", where, FlatParts(held.view(-1), turn.sent), received)


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
