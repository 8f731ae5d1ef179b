"""Transformers that are parts of other models or make something else: the blocks of UNets, embeddings, proteins."""

from __future__ import annotations

from typing import Any

import torch

from .transformers_entry import AUDIO, BATCH, IMAGE_TEXT, Tiny, flow_time, noise, ragged
from .transformers_image import latents

_FRAMES = AUDIO


def _spatial(variant: int) -> dict[str, Any]:
    text = IMAGE_TEXT[variant]
    return {
        "hidden_states": latents(variant, 16, patch=1),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_attention_mask": ragged(text),
    }


def _temporal(variant: int) -> dict[str, Any]:
    """Six pixels of a video; each sees itself in other frames."""
    return {"hidden_states": noise(_FRAMES[variant], 16, 2, 3), "num_frames": _FRAMES[variant]}


def _prior(variant: int) -> dict[str, Any]:
    """Two batches of text: one prediction each, read off at the last token."""
    return {
        "hidden_states": noise(BATCH, 16, seed=variant),
        "timestep": 1000 * flow_time(),
        "proj_embedding": noise(BATCH, 16, seed=2 + variant),
        "encoder_hidden_states": noise(BATCH, 31, 16, seed=variant),
        "attention_mask": ragged(31) if variant else torch.ones(BATCH, 31),
    }


def _protein(variant: int) -> dict[str, Any]:
    length = AUDIO[variant]
    every = torch.ones(BATCH, length, dtype=torch.bool)
    return {
        "bb_ca": noise(BATCH, length, 3),
        "local_latents": noise(BATCH, length, 8),
        "bb_ca_time": flow_time(),
        "local_latents_time": flow_time(),
        "padding_mask": ragged(length).flip(0).bool(),
        "conditioning": {"is_in_context_conditioning": ~every, "supports_local_latent": every},
    }


_UNET_BLOCK = {
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "in_channels": 16,
    "num_layers": 3,
    "norm_num_groups": 4,
}

ENTRIES = (
    Tiny(
        name="Transformer2DModel",
        family="unet_block",
        config=_UNET_BLOCK | {"cross_attention_dim": 32},
        call=_spatial,
        layout="BCHW",
    ),
    Tiny(
        name="DreamLiteTransformer2DModel",
        family="unet_block",
        config=_UNET_BLOCK | {"cross_attention_dim": 32},
        call=_spatial,
        layout="BCHW",
    ),
    Tiny(
        name="TransformerTemporalModel",
        family="unet_block",
        config=_UNET_BLOCK,
        call=_temporal,
        layout="FCHW",
    ),
    Tiny(
        name="PriorTransformer",
        family="prior",
        config={
            "num_attention_heads": 3,
            "attention_head_dim": 8,
            "num_layers": 3,
            "embedding_dim": 16,
            "num_embeddings": 31,
        },
        call=_prior,
        tokens="encoder_hidden_states",
        output_layout="BC",
        fixed="the number of its positions is part of its configuration",
    ),
    Tiny(
        name="RFD4ProteinaTransformer",
        family="protein",
        config={
            "nlayers": 3,
            "token_dim": 24,
            "nheads": 3,
            "dim_cond": 16,
            "pair_repr_dim": 16,
            "latent_dim": 8,
            "t_emb_dim": 16,
            "xt_pair_dist_dim": 6,
            "feats_seq": ("xt_bb_ca", "xt_local_latents"),
            "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents"),
            "feats_pair_repr": ("xt_bb_ca_pair_dists",),
            "feats_pair_cond": ("time_emb_bb_ca", "time_emb_local_latents"),
            "tri_mult_c": 8,
            "num_sequence_classes": 5,
        },
        call=_protein,
        tokens="local_latents",
    ),
)
