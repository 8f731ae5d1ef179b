"""HunyuanVideo and what was made after it: text and video in two streams, then in one, masks over all of it."""

from __future__ import annotations

from typing import Any

import torch

from .transformers_entry import BATCH, VIDEO, VIDEO_TEXT, Tiny, noise, ragged, step_time
from .transformers_video import latents

_HUNYUAN = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 2,
    "text_embed_dim": 32,
    "pooled_projection_dim": 32,
    "rope_axes_dim": (4, 4, 4),
}


def _hunyuan(variant: int) -> dict[str, Any]:
    return {
        "hidden_states": latents(variant, 4),
        "encoder_hidden_states": noise(BATCH, VIDEO_TEXT[variant], 32),
        "encoder_attention_mask": ragged(VIDEO_TEXT[variant]),
        "timestep": step_time(),
        "pooled_projections": noise(BATCH, 32),
        "guidance": torch.tensor([6000.0, 3000.0]),
    }


def _framepack(variant: int) -> dict[str, Any]:
    """Three memories of what came before stand in front of the frames to be denoised."""
    frames, rows, columns = VIDEO[variant]
    past = noise(BATCH, 4, 8, 2 * rows, 2 * columns, seed=1)
    return _hunyuan(variant) | {
        "image_embeds": noise(BATCH, 6, 24),
        "indices_latents": torch.arange(8, 8 + frames),
        "latents_clean": past[:, :, 6:],
        "indices_latents_clean": torch.arange(6, 8),
        "latents_history_2x": past[:, :, 4:6],
        "indices_latents_history_2x": torch.arange(4, 6),
        "latents_history_4x": past[:, :, :4],
        "indices_latents_history_4x": torch.arange(4),
    }


def _hunyuan15(variant: int) -> dict[str, Any]:
    """Two texts and the tokens of an image, as many as `VIDEO_TEXT` says together."""
    text = VIDEO_TEXT[variant] - 12
    return {
        "hidden_states": latents(variant, 4, patch=1),
        "timestep": step_time(),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_attention_mask": ragged(text),
        "encoder_hidden_states_2": noise(BATCH, 7, 16),
        "encoder_attention_mask_2": ragged(7),
        "image_embeds": noise(BATCH, 5, 24),
    }


def _motif(variant: int) -> dict[str, Any]:
    text = VIDEO_TEXT[variant]
    return {
        "hidden_states": latents(variant, 4),
        "timestep": step_time(),
        "encoder_hidden_states": noise(BATCH, text - 6, 32),
        "encoder_attention_mask": ragged(text - 6),
        "image_embeds": noise(BATCH, 6, 24),
    }


def _joy(variant: int) -> dict[str, Any]:
    return {
        "hidden_states": latents(variant, 4),
        "timestep": step_time(),
        "encoder_hidden_states": noise(BATCH, VIDEO_TEXT[variant], 32),
    }


def _joy_plus(variant: int) -> dict[str, Any]:
    """Patches of two images in a row, one after the other; the second sample's first image is smaller."""
    frames, rows, columns = VIDEO[variant]
    text = VIDEO_TEXT[variant]
    return {
        "hidden_states": noise(BATCH, frames * rows * columns, 4, 1, 2, 2),
        "timestep": step_time(),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_hidden_states_mask": ragged(text).float(),
        "shape_list": [
            [(frames - 1, rows, columns), (1, rows, columns)],
            [(frames - 1, rows, columns), (1, rows - 1, columns)],
        ],
    }


_JOY = {
    "in_channels": 4,
    "hidden_size": 36,
    "num_attention_heads": 3,
    "text_dim": 32,
    "num_layers": 3,
    "rope_dim_list": [4, 4, 4],
}

ENTRIES = (
    Tiny(
        name="HunyuanVideoTransformer3DModel",
        family="hunyuan_video",
        config=_HUNYUAN,
        call=_hunyuan,
        layout="BCFHW",
    ),
    Tiny(
        name="HunyuanVideoFramepackTransformer3DModel",
        family="hunyuan_video",
        config=_HUNYUAN | {"has_image_proj": True, "image_proj_dim": 24, "has_clean_x_embedder": True},
        call=_framepack,
        layout="BCFHW",
    ),
    Tiny(
        name="HunyuanVideo15Transformer3DModel",
        family="hunyuan_video",
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 3,
            "attention_head_dim": 12,
            "num_layers": 3,
            "num_refiner_layers": 2,
            "text_embed_dim": 32,
            "text_embed_2_dim": 16,
            "image_embed_dim": 24,
            "rope_axes_dim": (4, 4, 4),
        },
        call=_hunyuan15,
        layout="BCFHW",
    ),
    Tiny(
        name="MotifVideoTransformer3DModel",
        family="motif",
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 3,
            "attention_head_dim": 12,
            "num_layers": 2,
            "num_single_layers": 4,
            "num_decoder_layers": 2,
            "text_embed_dim": 32,
            "image_embed_dim": 24,
            "rope_axes_dim": (4, 4, 4),
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        },
        call=_motif,
        layout="BCFHW",
    ),
    Tiny(name="JoyImageEditTransformer3DModel", family="joy", config=_JOY, call=_joy, layout="BCFHW"),
    Tiny(name="JoyImageEditPlusTransformer3DModel", family="joy", config=_JOY, call=_joy_plus, layout="BSCCCC"),
)
