"""All-gather of keys and values, fresh and exact, as DistriFusion gathers them (arXiv:2402.19481).

    at once       keys and values of all ranks in one buffer, and one attention to all of them
    in parts      to its own keys while the others' arrive, and to each rank's as soon as they are received

In parts, some of the link's time is hidden, and the partial results have to be merged. At once, each rank packs its
tokens [l, B, M + M, D] by one kernel, keys beside values, so that the parts of all ranks joined are whole: keys and
values are views of [L, B, M + M, D], which attention reads as they are.

sent by each rank       2 (N-1)/N of the sequence, to all ranks; one round
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.attention_memory import Made
from patchpar.shard.attention.partial import Partial, attend_others, attend_own, merge_partials
from patchpar.shard.attention.sharded_qkv import ShardedQKV


def pack_tokens(tensors_BNlD: Sequence[Tensor], *, into: Tensor | None = None) -> Tensor:
    """Return the tensors side by side, [l, B, sum of N, D], in `into` where it is given."""
    by_token: list[Tensor] = []
    for x in tensors_BNlD:
        # detached: where gradients are recorded nothing can be written to a buffer, and none pass through other ranks
        alone = x.detach() if x.requires_grad and into is not None else x
        by_token.append(alone.permute(2, 0, 1, 3))
    return torch.cat(by_token, 2) if into is None else torch.cat(by_token, 2, out=into)


def unpack_tokens(packed: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """Return views [B, N, l, D] of packed tensors with so many heads."""
    return list(packed.permute(1, 2, 0, 3).split_with_sizes(heads, 1))


class GatheredKeys(NamedTuple):
    """Views of keys beside values of the whole sequence [L, B, M + M, D]: the first two are written.

    `common` [B, M + M, c, D] and `own` [B, M + M, l, D] of this rank. `of_rank` [l, B, M + M, D]: its own as they are
    sent, among those of all ranks, `of_ranks`. `key` and `value` [B, M, L, D].
    """

    common: Tensor | None
    own: Tensor
    of_rank: Tensor
    of_ranks: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def empty(cls, shared: ShardedQKV) -> "Made[GatheredKeys]":
        """Return them without values, for ranks with equally many tokens."""
        (batch, heads, _, width), common, size = shared.k_BMlD.shape, shared.common, shared.sizes[0]
        whole = shared.k_BMlD.new_empty((shared.total, batch, 2 * heads, width))
        of_ranks = whole.narrow(0, common, shared.total - common)
        key, value = unpack_tokens(whole, (heads, heads))
        of_rank, by_head = of_ranks.narrow(0, shared.group_rank * size, size), whole.permute(1, 2, 0, 3)
        of_common = by_head.narrow(2, 0, common) if common else None
        return cls(of_common, of_rank.permute(1, 2, 0, 3), of_rank, of_ranks, key, value), [whole]


def attend_gathered(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D], by the kernel of `shared`. Raises ExchangeError."""
    sizes = shared.sizes
    if len(set(sizes)) > 1:
        return _attend_gathered_unevenly(comm, axis, where, shared)
    like, common = shared.k_BMlD, shared.common
    key = ("gathered", sizes, shared.group_rank, common, like.shape, like.dtype)
    found = shared.buffers(key, partial(GatheredKeys.empty, shared))
    keys, values = like, shared.v_BMlD
    if like.requires_grad or values.requires_grad:  # nothing that records gradients can be written to a buffer
        keys, values = keys.detach(), values.detach()
    if found.common is not None:
        torch.cat((keys.narrow(2, 0, common), values.narrow(2, 0, common)), 1, out=found.common)
        keys, values = (x.narrow(2, common, sizes[0]) for x in (keys, values))
    torch.cat((keys, values), 1, out=found.own)
    comm.all_gather(axis, "kv", where, found.of_rank, into=found.of_ranks).wait()
    return attend_to_all(shared, found.key, found.value)


def attend_to_all(shared: ShardedQKV, k_BMLD: Tensor, v_BMLD: Tensor) -> Tensor:
    """Return the output [B, N, c + l, D] of this rank's queries, from the keys and values of the whole sequence."""
    mask = None if shared.mask is None else shared.mask_of_own
    return shared.attend_to(shared.q_BNlD, k_BMLD, v_BMLD, mask)


def _attend_gathered_unevenly(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    packed, heads = pack_tokens((shared.k_BMlD, shared.v_BMlD)), shared.k_BMlD.shape[1]
    common, own = packed.split_with_sizes((shared.common, packed.shape[0] - shared.common))

    def specs(group_rank: int) -> list[TensorSpec]:
        return [TensorSpec((shared.sizes[group_rank], *packed.shape[1:]), packed.dtype)]

    parts = [tensors[0] for tensors in AllGather(comm, axis, "kv", where).start([own], specs).wait()]
    return attend_to_all(shared, *unpack_tokens(torch.cat([common, *parts]), (heads, heads)))


def attend_in_parts(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D]. Raises ExchangeError."""
    gather = AllGather(comm, axis, "kv", where)
    pending = gather.start([shared.stacked_keys()], lambda group_rank: [shared.stacked_spec(group_rank)])

    def partials() -> Iterator[Partial]:
        yield attend_own(shared)
        for group_rank, (stacked,) in zip(axis.others, pending.arriving(), strict=True):
            yield attend_others(shared, group_rank, stacked)

    return merge_partials(partials()).out_BNlD
