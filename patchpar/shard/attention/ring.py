"""Ring attention (Liu et al., arXiv:2310.01889): keys and values travel round a ring in one or both directions.

    one way      N-1 rounds, each rank sends on what it received
    both ways    N/2 rounds: keys and values go half-way round in each direction and use both directions of a link

The next round is sent while this round's keys are attended to. Where ranks have operations of all of them, a round of
the ring one way is one, in which each rank sends to one other: messages of their own take longer to begin.

sent by each rank       2 (N-1)/N of the sequence, to the neighbours
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import collectives_of
from patchpar.comm.layouts import AllToAllLayout, all_to_all_layout
from patchpar.comm.transport import FlatParts, Incoming, Messages, Outgoing, Work
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.attention_memory import Made
from patchpar.shard.attention.lse_kernels import LseKernel, attend_by, kernel_of
from patchpar.shard.attention.partial import Partial, attend_locally, attend_others, attend_own, merge_partials
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
    """A round of the ring one way: what is sent to the next rank and received from the one before, in elements.

    `key` and `value` [B, M, k, D] are views of what is received, of the rank `owner`.
    """

    sent: FlatParts
    received: FlatParts
    layout: AllToAllLayout
    owner: int
    key: Tensor
    value: Tensor


class _Rounds(NamedTuple):
    """All rounds, and where this rank's keys and values are sent from, [2, B, M, l, D].

    Of two buffers one is sent while the other one is received into; what has been received is sent in the next round.
    By then the keys that were in the other one have been sent and attended to: this rank's own not there at all.
    """

    own: Tensor
    rounds: tuple[_Round, ...]

    @classmethod
    def of(cls, axis: Axis, shared: ShardedQKV) -> "Made[_Rounds]":
        """Return them without values."""
        batch, heads, _, width = shared.k_BMlD.shape
        token, sizes, like = 2 * batch * heads * width, shared.sizes, shared.k_BMlD
        memory = [like.new_empty(token * max(sizes)) for _ in range(min(2, axis.size))]
        owners = [(axis.rank - step) % axis.size for step in range(axis.size)]
        own, rounds = memory[0].narrow(0, 0, token * sizes[axis.rank]), list[_Round]()
        held = own
        for number, (before, owner) in enumerate(pairwise(owners), 1):
            buffer = memory[number % 2].narrow(0, 0, token * sizes[owner])
            sent = FlatParts(held, _part(axis, axis.rank + 1, token * sizes[before]))
            received = FlatParts(buffer, _part(axis, axis.rank - 1, token * sizes[owner]))
            layout = all_to_all_layout(axis, sent.sizes, received.sizes, like.dtype)
            key, value = buffer.view(2, batch, heads, sizes[owner], width).unbind()
            rounds.append(_Round(sent, received, layout, owner, key, value))
            held = buffer
        return cls(own.view(2, batch, heads, sizes[axis.rank], width), tuple(rounds)), memory


def _part(axis: Axis, peer: int, elements: int) -> tuple[int, ...]:
    """Return how many elements each rank gets or sends, where it is one alone."""
    return tuple(elements if p == peer % axis.size else 0 for p in range(axis.size))


def _in_rounds(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Iterator[Partial]:
    """Yield attention to this rank's keys, and to those of each round of the ring one way. Raises ExchangeError."""
    like = shared.k_BMlD
    own, rounds = shared.buffers(
        ("ring", axis, shared.sizes, like.shape, like.dtype), partial(_Rounds.of, axis, shared)
    )
    torch.stack([x.detach() if x.requires_grad else x for x in shared.own_keys], out=own)
    kernel = None if shared.mask is not None else kernel_of(shared.q_BNlD, like, keys=min(shared.sizes), masked=False)
    pending: Work[Tensor] | None = None
    for number, (sent, received, layout, *_) in enumerate(rounds):
        if pending is not None:
            pending.wait()
        pending = comm.all_to_all(axis, "kv", where, sent, received, layout)
        yield _attend_round(shared, kernel, rounds[number - 1] if number else None)
    if pending is not None:
        pending.wait()
    yield _attend_round(shared, kernel, rounds[-1] if rounds else None)
    if shared.memory is not None:
        shared.memory.release()  # before the merge


def _attend_round(shared: ShardedQKV, kernel: LseKernel | None, turn: _Round | None) -> Partial:
    """Return attention to the keys of a round, or to the common keys and this rank's. `kernel`: of all, if known."""
    key, value = (shared.k_BMlD, shared.v_BMlD) if turn is None else (turn.key, turn.value)
    if kernel is not None:
        return Partial(*attend_by(kernel, shared.q_BNlD, key, value, None, shared.scale))
    if turn is None:
        return attend_own(shared)
    bias = shared.bias(shared.own_rows, [shared.span(turn.owner)])
    return attend_locally(shared.q_BNlD, key, value, bias=bias, scale=shared.scale)


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
