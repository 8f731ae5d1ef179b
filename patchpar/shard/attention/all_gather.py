"""Everybody's keys and values come to every place at once, as DistriFusion gathers them (arXiv:2402.19481), exactly.

Own queries against own keys while the others' are on their way, each place's as soon as it is here.

sent by each place      2 (N-1)/N of the sequence, to everyone; one round
"""

from collections.abc import Iterator

from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.blockwise import attend_others, attend_own
from patchpar.shard.attention.partial import Partial, merge_partials
from patchpar.shard.attention.sharded_qkv import ShardedQKV


def attend_gathered(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Output [B, N, c + l, D] of this place. Raises ExchangeError."""
    own = [x.contiguous() for x in shared.own_keys]
    pending = AllGather(comm, axis, "kv", where).start(own, shared.key_specs)

    def partials() -> Iterator[Partial]:
        yield attend_own(shared)
        for group_rank, (k_BMkD, v_BMkD) in zip(axis.others, pending.arriving(), strict=True):
            yield from attend_others(shared, group_rank, k_BMkD, v_BMkD)

    return merge_partials(partials()).out_BNlD
