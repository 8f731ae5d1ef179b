"""Keys and values of tokens in one buffer [tokens, 2, B, N, D]: gathered there, and attended to as they lie.

Shape letters: T tokens of the buffer, l some of them, B batch, N heads, D head width, q queries.
"""

from dataclasses import replace

from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart
from patchpar.comm.transport import TensorSpec
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.stale_partials import KeysValues
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.token_slots import TokenSlots


def attend_to_tokens(call: AttentionCall, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return attention [B, N, q, D] of the call's queries to `tokens` [T, 2, B, N, D]; `mask` has their columns."""
    key, value = (x.transpose(1, 2) for x in in_batches(tokens))
    gqa = call.query.shape[1] != key.shape[1]
    return replace(call, key=key, value=value, attn_mask=mask, enable_gqa=gqa).run()


def in_batches(tokens: Tensor) -> KeysValues:
    """Return views of the keys and values of `tokens` [l, 2, B, N, D]."""
    return KeysValues(*(x.transpose(0, 1) for x in tokens.unbind(1)))


def fresh_part(axis: Axis, slots: TokenSlots, fresh: Tensor) -> ExchangePart:
    """Return the exchange in which `fresh` [T, 2, B, N, D] gets the tokens of all ranks beside this rank's."""
    peers = tuple(axis.ranks[p] for p in axis.others)
    into = {axis.ranks[p]: (slots.of(fresh, p),) for p in axis.others}
    specs = {rank: (TensorSpec.of(x),) for rank, (x,) in into.items()}
    return ExchangePart("kv", [(peers, (slots.of(fresh, axis.rank),))], specs, into, axis, to_all=True, at_once=True)
