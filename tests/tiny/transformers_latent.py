"""Transformers that cut a latent image into patches by themselves, text beside them or seen by cross-attention."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

from .transformers_entry import BATCH, IMAGE, IMAGE_TEXT, Tiny, angles, flow_time, noise, ragged, step_time
from .transformers_image import latents


def _text(variant: int) -> dict[str, Any]:
    return {
        "hidden_states": latents(variant, 4),
        "encoder_hidden_states": noise(BATCH, IMAGE_TEXT[variant], 32),
        "timestep": step_time(),
    }


def _aura(variant: int) -> dict[str, Any]:
    """Eight registers of its own come before the text."""
    return _text(variant) | {
        "encoder_hidden_states": noise(BATCH, IMAGE_TEXT[variant] - 8, 32),
        "timestep": flow_time(),
    }


def _crops(variant: int) -> dict[str, Any]:
    rows, columns = IMAGE[variant]
    sizes = torch.tensor([[16.0 * rows, 16.0 * columns]] * BATCH)
    return {"target_size": sizes, "crop_coords": torch.zeros(BATCH, 2)}


def _cogview(variant: int) -> dict[str, Any]:
    crops = _crops(variant)
    return _text(variant) | crops | {"original_size": crops["target_size"]}


def _glm(variant: int) -> dict[str, Any]:
    """Each image token has a prior token added to it; the second sample goes without."""
    rows, columns = IMAGE[variant]
    prior = torch.arange(BATCH * rows * columns).reshape(BATCH, -1) * 7 % 32
    prior_drop = torch.tensor([False, True])
    return _text(variant) | _crops(variant) | {"prior_token_id": prior, "prior_token_drop": prior_drop}


def _hunyuan_dit(variant: int) -> dict[str, Any]:
    """Two texts of fixed lengths, 12 together."""
    rows, columns = IMAGE[variant]
    return {
        "hidden_states": latents(variant, 4),
        "timestep": step_time(),
        "encoder_hidden_states": noise(BATCH, 5, 32),
        "text_embedding_mask": ragged(5),
        "encoder_hidden_states_t5": noise(BATCH, 7, 32),
        "text_embedding_mask_t5": ragged(7),
        "image_meta_size": torch.tensor([[128.0, 128, 128, 128, 0, 0]] * BATCH),
        "style": torch.zeros(BATCH, dtype=torch.long),
        "image_rotary_emb": angles(rows * columns, 8),
    }


def _hunyuan_image(variant: int) -> dict[str, Any]:
    return _text(variant) | {
        "hidden_states": latents(variant, 4, patch=1),
        "encoder_attention_mask": ragged(IMAGE_TEXT[variant]),
        "guidance": torch.tensor([3500.0, 2000.0]),
    }


def _lumina_next(variant: int) -> dict[str, Any]:
    return _text(variant) | {
        "encoder_mask": ragged(IMAGE_TEXT[variant]),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(8, 16, 16),
        "timestep": flow_time(),
        "cross_attention_kwargs": {},
    }


def _masked(variant: int) -> dict[str, Any]:
    return _text(variant) | {"timestep": flow_time(), "attention_mask": ragged(IMAGE_TEXT[variant]).bool()}


def _sequence_first(variant: int) -> dict[str, Any]:
    """Text comes after the image, and its padding at the end."""
    text = IMAGE_TEXT[variant]
    return {
        "hidden_states": latents(variant, 4, patch=1),
        "timestep": step_time(),
        "text_bth": noise(BATCH, text, 32),
        "text_lens": ragged(text).sum(1),
    }


_COGVIEW = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 3,
    "text_embed_dim": 32,
    "time_embed_dim": 32,
    "condition_dim": 8,
}
ENTRIES = (
    Tiny(
        name="AuraFlowTransformer2DModel",
        family="auraflow",
        config={
            "sample_size": 16,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 3,
            "joint_attention_dim": 32,
            "caption_projection_dim": 24,
            "pos_embed_max_size": 144,
        },
        call=_aura,
        layout="BCHW",
    ),
    Tiny(
        name="CogView3PlusTransformer2DModel",
        family="cogview",
        config=_COGVIEW | {"pos_embed_max_size": 16, "sample_size": 16},
        call=_cogview,
        layout="BCHW",
    ),
    Tiny(name="CogView4Transformer2DModel", family="cogview", config=_COGVIEW, call=_cogview, layout="BCHW"),
    Tiny(
        name="GlmImageTransformer2DModel",
        family="glm_image",
        config=_COGVIEW | {"prior_vq_quantizer_codebook_size": 32},
        call=_glm,
        layout="BCHW",
    ),
    Tiny(
        name="HunyuanDiT2DModel",
        family="hunyuan_dit",
        config={
            "num_attention_heads": 3,
            "attention_head_dim": 8,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 16,
            "hidden_size": 24,
            "num_layers": 4,
            "cross_attention_dim": 32,
            "cross_attention_dim_t5": 32,
            "pooled_projection_dim": 16,
            "text_len": 5,
            "text_len_t5": 7,
        },
        call=_hunyuan_dit,
        layout="BCHW",
    ),
    Tiny(
        name="HunyuanImageTransformer2DModel",
        family="hunyuan_image",
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 3,
            "attention_head_dim": 12,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 2,
            "guidance_embeds": True,
            "text_embed_dim": 32,
            "rope_axes_dim": (6, 6),
        },
        call=_hunyuan_image,
        layout="BCHW",
    ),
    Tiny(
        name="LuminaNextDiT2DModel",
        family="lumina",
        config={
            "sample_size": 16,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 3,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 8,
            "cross_attention_dim": 32,
        },
        call=_lumina_next,
        layout="BCHW",
        empty=("pad_token",),
    ),
    Tiny(
        name="PRXTransformer2DModel",
        family="prx",
        config={
            "in_channels": 4,
            "context_in_dim": 32,
            "hidden_size": 24,
            "num_heads": 3,
            "depth": 3,
            "axes_dim": [4, 4],
        },
        call=_masked,
        layout="BCHW",
    ),
    Tiny(
        name="ErnieImageTransformer2DModel",
        family="ernie",
        config={
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_layers": 3,
            "ffn_hidden_size": 64,
            "in_channels": 4,
            "out_channels": 4,
            "text_in_dim": 32,
            "rope_axes_dim": (4, 4, 4),
        },
        call=_sequence_first,
        layout="BCHW",
    ),
)
