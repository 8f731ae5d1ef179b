"""The exact attention modes over tokens of several ranks, by name. All equal attention on one rank with all tokens."""

from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.all_gather import attend_gathered, attend_in_parts
from patchpar.shard.attention.ring import attend_both_ways, attend_in_ring
from patchpar.shard.attention.sharded_qkv import ShardedQKV
from patchpar.shard.attention.token_ring import attend_in_token_ring
from patchpar.shard.attention.ulysses import Mode, attend_by_heads

MODES: dict[str, Mode] = {
    "gather": attend_gathered,
    "ring": attend_in_ring,
    "two-way-ring": attend_both_ways,
    "token-ring": attend_in_token_ring,
}


def on_link_of(transport: Transport, keys: AttentionMode) -> AttentionMode:
    """Return the mode with its `overlap` decided: not where GPUs gather in one operation, in which all keys arrive.

    There parts of an attention and their merge would only add launches. Over other links waiting costs more than that.
    """
    return keys.on_link(overlap=transport.collectives is None)


def attend_together(keys: AttentionMode, comm: Communicator, axis: Axis, where: str, shared: ShardedQKV) -> Tensor:
    """Return this rank's output [B, N, c + l, D]. Raises ExchangeError, PlanError, UnsupportedModel.

    A kernel of the user's is called with all keys at once.
    """
    mode = MODES[keys.algorithm]
    if shared.kernel is None and keys.algorithm == "gather":
        overlaps = comm.transport.collectives is None if keys.overlap is None else keys.overlap
        mode = attend_in_parts if overlaps else mode
    if keys.ulysses == 1:
        return mode(comm, axis, where, shared)
    if axis.size % keys.ulysses:
        keys.check_group_size(axis.size)  # which raises, without a call in every attention
    return attend_by_heads(comm, axis, where, shared, degree=keys.ulysses, between=mode)
