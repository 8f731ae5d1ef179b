"""Transformers of video: tokens are frames, rows and columns."""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

from .transformers_entry import BATCH, VIDEO, VIDEO_TEXT, Tiny, angles, noise, positions, ragged, step_time


def latents(variant: int, channels: int, patch: int = 2) -> torch.Tensor:
    """A video latent (B, C, F, H, W) that makes `VIDEO[variant]` patches of one frame each."""
    frames, rows, columns = VIDEO[variant]
    return noise(BATCH, channels, frames, patch * rows, patch * columns)


def _text(variant: int) -> dict[str, Any]:
    return {"encoder_hidden_states": noise(BATCH, VIDEO_TEXT[variant], 32), "timestep": step_time()}


def _text_video(variant: int) -> dict[str, Any]:
    return _text(variant) | {"hidden_states": latents(variant, 4)}


def _cogvideox(variant: int) -> dict[str, Any]:
    return _text(variant) | {
        "hidden_states": latents(variant, 4).transpose(1, 2),
        "image_rotary_emb": angles(math.prod(VIDEO[variant]), 16),
    }


def _consisid(variant: int) -> dict[str, Any]:
    """A face, and two scales of a vision model's features of it."""
    face = {"id_cond": noise(BATCH, 24), "id_vit_hidden": [noise(BATCH, 6, 16, seed=scale) for scale in range(2)]}
    return _cogvideox(variant) | face


def _ltx(variant: int) -> dict[str, Any]:
    frames, rows, columns = VIDEO[variant]
    return _text(variant) | {
        "hidden_states": noise(BATCH, frames * rows * columns, 8),
        "encoder_attention_mask": ragged(VIDEO_TEXT[variant]),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "rope_interpolation_scale": (1 / 25, 32, 32),
    }


def _allegro(variant: int) -> dict[str, Any]:
    frames, rows, columns = VIDEO[variant]
    angles_and_axes = get_3d_rotary_pos_embed_allegro(12, ((0, 0), (rows, columns)), (rows, columns), frames)
    axes = positions(frames, rows, columns).long().T[:, None].unbind()
    return _text_video(variant) | {
        "attention_mask": torch.ones(BATCH, frames, 2 * rows, 2 * columns),
        "encoder_attention_mask": ragged(VIDEO_TEXT[variant]),
        "image_rotary_emb": (angles_and_axes[:3], axes),
    }


def _mochi(variant: int) -> dict[str, Any]:
    return _text_video(variant) | {"encoder_attention_mask": ragged(VIDEO_TEXT[variant]).bool()}


def _latte(variant: int) -> dict[str, Any]:
    """Positions are made for five frames and no other number."""
    rows, columns = ((5, 7), (4, 6))[variant]
    return _text(variant) | {"hidden_states": noise(BATCH, 4, 5, 2 * rows, 2 * columns)}


def _cosmos(variant: int) -> dict[str, Any]:
    return _text_video(variant) | {"fps": 24}


_COGVIDEOX = {
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 32,
    "num_layers": 3,
    "sample_width": 12,
    "sample_height": 8,
    "sample_frames": 9,
    "use_rotary_positional_embeddings": True,
}
_FACE = {
    "num_layers": 4,
    "is_train_face": True,
    "cross_attn_dim_head": 8,
    "cross_attn_num_heads": 2,
    "LFE_id_dim": 24,
    "LFE_vit_dim": 16,
    "LFE_depth": 2,
    "LFE_dim_head": 8,
    "LFE_num_heads": 2,
    "LFE_num_querie": 4,
    "LFE_output_dim": 32,
    "LFE_num_scale": 2,
}
_HEADS = {"num_attention_heads": 3, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}

ENTRIES = (
    Tiny(name="CogVideoXTransformer3DModel", family="cogvideox", config=_COGVIDEOX, call=_cogvideox, layout="BFCHW"),
    Tiny(
        name="ConsisIDTransformer3DModel",
        family="cogvideox",
        config=_COGVIDEOX | _FACE,
        call=_consisid,
        layout="BFCHW",
    ),
    Tiny(
        name="LTXVideoTransformer3DModel",
        family="ltx",
        config=_HEADS
        | {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 36, "num_layers": 3, "caption_channels": 32},
        call=_ltx,
    ),
    Tiny(
        name="AllegroTransformer3DModel",
        family="allegro",
        config=_HEADS
        | {
            "num_layers": 3,
            "cross_attention_dim": 36,
            "sample_height": 8,
            "sample_width": 8,
            "sample_frames": 4,
            "caption_channels": 32,
        },
        call=_allegro,
        layout="BCFHW",
    ),
    Tiny(
        name="MochiTransformer3DModel",
        family="mochi",
        config=_HEADS
        | {
            "num_layers": 3,
            "pooled_projection_dim": 16,
            "text_embed_dim": 32,
            "time_embed_dim": 16,
            "max_sequence_length": 64,
        },
        call=_mochi,
        layout="BCFHW",
    ),
    Tiny(
        name="LatteTransformer3DModel",
        family="latte",
        config=_HEADS
        | {
            "out_channels": 8,
            "num_layers": 3,
            "cross_attention_dim": 36,
            "attention_bias": True,
            "sample_size": 16,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "caption_channels": 32,
            "video_length": 5,
        },
        call=_latte,
        layout="BCFHW",
    ),
    Tiny(
        name="EasyAnimateTransformer3DModel",
        family="easyanimate",
        config=_HEADS
        | {"attention_head_dim": 16, "patch_size": 2, "num_layers": 3, "mmdit_layers": 2, "text_embed_dim": 32}
        | {"time_embed_dim": 16, "add_norm_text_encoder": True},
        call=_text_video,
        layout="BCFHW",
    ),
    Tiny(
        name="CosmosTransformer3DModel",
        family="cosmos",
        config=_HEADS
        | {
            "num_layers": 3,
            "mlp_ratio": 2.0,
            "text_embed_dim": 32,
            "adaln_lora_dim": 16,
            "max_size": (8, 32, 32),
            "concat_padding_mask": False,
        },
        call=_cosmos,
        layout="BCFHW",
    ),
)
