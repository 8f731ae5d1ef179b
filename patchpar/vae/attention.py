"""Attention of a band's own queries to the keys of all bands.

    every frame by itself     tokens of one picture: keys come from everybody, merged by log-sum-exp
    causal over frames        a mask that lets a frame see those before it: frame by frame, and no mask

Shape letters as in `layers`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.errors import UnsupportedModel
from patchpar.exchange import Gather
from patchpar.sequence.call import Shared
from patchpar.sequence.gathered import attend_gathered
from patchpar.vae.band import Band


def attend(  # noqa: PLR0913 - the signature is torch's
    band: Band,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention of our tokens. Raises UnsupportedModel, ExchangeError."""
    if not band.exchanging:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if query.ndim == 3:  # one head, and no dim for it
        q_BNlD, k_BNlD, v_BNlD = (x.unsqueeze(1) for x in (query, key, value))
        mask = None if attn_mask is None else attn_mask.unsqueeze(1)
        return attend(band, q_BNlD, k_BNlD, v_BNlD, mask, dropout_p, is_causal, scale, enable_gqa).squeeze(1)
    if dropout_p or is_causal or query.ndim != 4 or query.shape[:3] != key.shape[:3]:
        raise UnsupportedModel(f"{band.where}: attention that is no self-attention over pixels")
    own = key.shape[2]
    if not band.fits(own):
        raise UnsupportedModel(f"{band.where}: attention over {own} tokens, which do not grow with the rows")
    sizes = tuple(band.scaled(own, place) for place in range(len(band.share.bands)))
    shared = Shared(q_BNlD=query, k_BMlD=key, v_BMlD=value, sizes=sizes, place=band.share.place, scale=scale)
    if attn_mask is None:
        return attend_gathered(band.share.door, band.share.axis, band.where, shared)
    return _frame_by_frame(band, shared, _frames_seen(band, attn_mask, own))


def _frames_seen(band: Band, mask: Tensor, tokens: int) -> Tensor:
    """Which frames a frame sees [F, F]: all tokens of a frame are alike. Raises UnsupportedModel."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    seen = seen.reshape(-1, tokens, tokens)[0] if seen.shape[-2:] == (tokens, tokens) else seen.new_zeros(1, 1)
    pixels = int(seen[0].sum())  # the first frame sees itself alone
    if not pixels or tokens % pixels:
        raise UnsupportedModel(f"{band.where}: attention with a mask that is not causal over frames")
    return seen[::pixels, ::pixels]


def _frame_by_frame(band: Band, shared: Shared, seen_FF: Tensor) -> Tensor:
    """Each frame's queries against the frames it sees, of all places: no mask of all tokens is made."""
    frames = seen_FF.shape[0]
    own = [x.contiguous() for x in shared.own_keys]
    gathered = Gather(band.share.door, band.share.axis, "kv", band.where).start(own, shared.key_specs).wait()
    places = [[_in_frames(x, frames) for x in tensors] for tensors in gathered]
    outs = []
    for number, q_BNlD in enumerate(_in_frames(shared.q_BNlD, frames).unbind(2)):
        visible = seen_FF[number]
        k_BNkD, v_BNkD = (
            torch.cat([tensors[index][:, :, visible].flatten(2, 3) for tensors in places], 2) for index in (0, 1)
        )
        outs.append(F.scaled_dot_product_attention(q_BNlD, k_BNkD, v_BNkD, scale=shared.scale))
    return torch.cat(outs, 2)


def _in_frames(x_BNlD: Tensor, frames: int) -> Tensor:
    """[B, N, frames, tokens of one, D]."""
    batch, heads, _, width = x_BNlD.shape
    return x_BNlD.reshape(batch, heads, frames, -1, width)
