"""All-gather of keys and values, fresh and exact, as DistriFusion gathers them (arXiv:2402.19481).

A rank attends to its own keys while the others' arrive, and to each rank's as soon as they are received.

sent by each rank       2 (N-1)/N of the sequence, to all ranks; one round
"""

from collections.abc import Iterator

from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.blockwise import attend_others, attend_own
from patchpar.shard.attention.partial import Partial, merge_partials
from patchpar.shard.attention.sharded_qkv import ShardedQKV


def attend_gathered(comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D]. Raises ExchangeError."""
    own = [x.contiguous() for x in shared.own_keys]
    pending = AllGather(comm, axis, "kv", where).start(own, shared.key_specs)

    def partials() -> Iterator[Partial]:
        yield attend_own(shared)
        for group_rank, (k_BMkD, v_BMkD) in zip(axis.others, pending.arriving(), strict=True):
            yield from attend_others(shared, group_rank, k_BMkD, v_BMkD)

    return merge_partials(partials()).out_BNlD
