"""All-gather of keys and values, fresh and exact, as DistriFusion gathers them (arXiv:2402.19481).

    at once       keys and values of all ranks in one buffer, and one attention to all of them
    in parts      to its own keys while the others' arrive, and to each rank's as soon as they are received

In parts, some of the link's time is hidden, and the partial results have to be merged. At once, each rank packs its
tokens [l, B, M + M, D] by one kernel, keys beside values, so that the parts of all ranks joined are whole: keys and
values are views of [L, B, M + M, D], which attention reads as they are.

sent by each rank       2 (N-1)/N of the sequence, to all ranks; one round
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.partial import Partial, attend_others, attend_own, merge_partials
from patchpar.shard.attention.sharded_qkv import ShardedQKV
from patchpar.shard.sdpa import AttentionCall


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


def attend_gathered(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D], by the kernel of `shared`. Raises ExchangeError."""
    heads = shared.k_BMlD.shape[1]
    k_BMLD, v_BMLD = unpack_tokens(_gathered(comm, axis, where, shared), (heads, heads))
    return attend_to_all(shared, k_BMLD, v_BMLD)


def attend_to_all(shared: ShardedQKV, k_BMLD: Tensor, v_BMLD: Tensor) -> Tensor:
    """Return the output [B, N, c + l, D] of this rank's queries, from the keys and values of the whole sequence."""
    call = AttentionCall(
        query=shared.q_BNlD,
        key=k_BMLD,
        value=v_BMLD,
        attn_mask=shared.mask_of_own,
        scale=shared.scale,
        enable_gqa=shared.q_BNlD.shape[1] != k_BMLD.shape[1],
        kernel=shared.kernel,
    )
    return call.run()


def _gathered(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return keys beside values of the whole sequence [L, B, M + M, D]."""
    common, sizes = shared.common, shared.sizes
    keys_values, own = (shared.k_BMlD, shared.v_BMlD), shared.own_keys
    if len(set(sizes)) > 1:
        return _gathered_from_uneven(comm, axis, where, shared)
    batch, heads, _, width = shared.k_BMlD.shape
    whole = own[0].new_empty((shared.total, batch, 2 * heads, width))
    gathered = whole
    if common:
        pack_tokens([x.narrow(2, 0, common) for x in keys_values], into=whole.narrow(0, 0, common))
        gathered = whole.narrow(0, common, shared.total - common)
    packed = pack_tokens(own, into=gathered.narrow(0, shared.group_rank * sizes[0], sizes[0]))
    comm.all_gather(axis, "kv", where, packed, into=gathered).wait()
    return whole


def _gathered_from_uneven(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    packed = pack_tokens((shared.k_BMlD, shared.v_BMlD))
    common, own = packed.split_with_sizes((shared.common, packed.shape[0] - shared.common))

    def specs(group_rank: int) -> list[TensorSpec]:
        return [TensorSpec((shared.sizes[group_rank], *packed.shape[1:]), packed.dtype)]

    parts = [tensors[0] for tensors in AllGather(comm, axis, "kv", where).start([own], specs).wait()]
    return torch.cat([common, *parts])


def attend_in_parts(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D]. Raises ExchangeError."""
    gather = AllGather(comm, axis, "kv", where)
    pending = gather.start([shared.stacked_keys()], lambda group_rank: [shared.stacked_spec(group_rank)])

    def partials() -> Iterator[Partial]:
        yield attend_own(shared)
        for group_rank, (stacked,) in zip(axis.others, pending.arriving(), strict=True):
            yield attend_others(shared, group_rank, stacked)

    return merge_partials(partials()).out_BNlD
