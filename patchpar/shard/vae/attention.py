"""Attention of a band's own queries to the keys of all bands.

    every frame by itself     tokens of one image: the keys of all ranks, merged by log-sum-exp
    causal over frames        a mask that lets a frame see those before it: frame by frame, without a mask

The queries of a large image are computed in chunks, so that memory is bounded where no kernel is fused, and so that a
rank reports progress: at 2048 x 2048 this one layer takes minutes on a core.
Shape letters as in `shard.attention.partial`.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.comm.collectives import AllGather
from patchpar.errors import UnsupportedModel
from patchpar.plan.attention_mode import AttentionMode
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.attention.partial import attend_locally, merge_partials
from patchpar.shard.attention.sharded_qkv import ShardedQKV
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.vae.band import VaeBand

MOST_PRODUCTS = {"cpu": 2**34}
"""Queries times keys times their width in one chunk: 10 ms on a GPU, seconds on a core."""
ON_GPUS = 2**40


def attend(band: VaeBand, call: AttentionCall) -> Tensor:
    """Return the output [B, N, l, D] of our queries with the keys of all ranks, or [B, l, D] for a call without heads.

    `call` has this rank's queries, keys and values [B, N, l, D] or [B, l, D]. Raises UnsupportedModel, ExchangeError.
    """
    if not band.exchanging:
        return call.run()
    if call.query.ndim == 3:
        return attend(band, call.with_heads()).squeeze(1)
    query, key = call.query, call.key
    if call.dropout_p or call.is_causal or query.ndim != 4 or query.shape[:3] != key.shape[:3]:
        raise UnsupportedModel(f"{band.where}: attention that is no self-attention over pixels")
    own = key.shape[2]
    if not band.fits(own):
        raise UnsupportedModel(f"{band.where}: attention over {own} tokens, which do not grow with the rows")
    sizes = tuple(band.scaled(own, group_rank) for group_rank in range(len(band.patch.bands)))
    shared = ShardedQKV(
        q_BNlD=query, k_BMlD=key, v_BMlD=call.value, sizes=sizes, group_rank=band.patch.group_rank, scale=call.scale
    )
    if call.attn_mask is None:
        count = _chunks(shared)
        if count > 1:
            return _in_chunks(band, shared, count)
        return attend_together(AttentionMode(), band.patch.comm, band.patch.axis, band.where, shared)
    return _frame_by_frame(band, shared, _frames_seen(band, call.attn_mask, own))


def _chunks(shared: ShardedQKV) -> int:
    """Return in how many chunks to compute the queries, the same on all ranks."""
    batch, heads, _, width = shared.q_BNlD.shape
    products = batch * heads * max(shared.sizes) * shared.total * width
    return min(*shared.sizes, math.ceil(products / MOST_PRODUCTS.get(shared.q_BNlD.device.type, ON_GPUS)))


def _in_chunks(band: VaeBand, shared: ShardedQKV, count: int) -> Tensor:
    """Attend with all queries, a chunk at a time, to the keys of all ranks. Results do not depend on the chunks."""
    comm, by_rank = band.patch.comm, _keys_by_rank(band, shared)
    outs = []
    for q_BNlD in shared.q_BNlD.tensor_split(count, 2):
        comm.beat(band.where)
        partials = (attend_locally(q_BNlD, *keys_and_values, scale=shared.scale) for keys_and_values in by_rank)
        outs.append(merge_partials(partials).out_BNlD)
    return torch.cat(outs, 2)


def _keys_by_rank(band: VaeBand, shared: ShardedQKV) -> list[tuple[Tensor, ...]]:
    """Return keys and values [B, N, k, D] of every rank."""
    gather = AllGather(band.patch.comm, band.patch.axis, "kv", band.where)
    gathered = gather.start([shared.stacked_keys()], lambda group_rank: [shared.stacked_spec(group_rank)]).wait()
    return [stacked.unbind() for (stacked,) in gathered]


def _frames_seen(band: VaeBand, mask: Tensor, tokens: int) -> Tensor:
    """Return which frames a frame sees [F, F], the same for all tokens of a frame. Raises UnsupportedModel.

    On the meta device, where a mask has no values, those before it.
    """
    if mask.is_meta:
        return torch.ones(band.frames, band.frames, dtype=torch.bool, device="cpu").tril()
    seen = mask if mask.dtype == torch.bool else mask == 0
    seen = seen.reshape(-1, tokens, tokens)[0] if seen.shape[-2:] == (tokens, tokens) else seen.new_zeros(1, 1)
    pixels = int(seen[0].sum())  # the first frame sees itself alone
    if not pixels or tokens % pixels:
        raise UnsupportedModel(f"{band.where}: attention with a mask that is not causal over frames")
    return seen[::pixels, ::pixels]


def _frame_by_frame(band: VaeBand, shared: ShardedQKV, seen_FF: Tensor) -> Tensor:
    """Attend with each frame's queries to the frames it sees, of all ranks, without a mask of all tokens."""
    frames = seen_FF.shape[0]
    by_rank = [[_in_frames(x, frames) for x in keys_and_values] for keys_and_values in _keys_by_rank(band, shared)]
    outs = []
    for number, q_BNlD in enumerate(_in_frames(shared.q_BNlD, frames).unbind(2)):
        band.patch.comm.beat(band.where)
        visible = seen_FF[number]
        k_BNkD, v_BNkD = (
            torch.cat([tensors[index][:, :, visible].flatten(2, 3) for tensors in by_rank], 2) for index in (0, 1)
        )
        outs.append(F.scaled_dot_product_attention(q_BNlD, k_BNkD, v_BNkD, scale=shared.scale))
    return torch.cat(outs, 2)


def _in_frames(x_BNlD: Tensor, frames: int) -> Tensor:
    """Return x as [B, N, frames, tokens of a frame, D]."""
    batch, heads, _, width = x_BNlD.shape
    return x_BNlD.reshape(batch, heads, frames, -1, width)
