"""Transformers of video: tokens are frames, rows and columns."""

from __future__ import annotations

import math
from typing import Any

import torch

from .transformers_entry import BATCH, VIDEO, VIDEO_TEXT, Tiny, angles, noise, ragged, step_time


def latents(variant: int, channels: int, patch: int = 2) -> torch.Tensor:
    """A video latent (B, C, F, H, W) that makes `VIDEO[variant]` patches of one frame each."""
    frames, rows, columns = VIDEO[variant]
    return noise(BATCH, channels, frames, patch * rows, patch * columns)


def _text(variant: int) -> dict[str, Any]:
    return {"encoder_hidden_states": noise(BATCH, VIDEO_TEXT[variant], 32), "timestep": step_time()}


def _hunyuan(variant: int) -> dict[str, Any]:
    return _text(variant) | {
        "hidden_states": latents(variant, 4),
        "encoder_attention_mask": ragged(VIDEO_TEXT[variant]),
        "pooled_projections": noise(BATCH, 32),
        "guidance": torch.tensor([6000.0, 3000.0]),
    }


def _cogvideox(variant: int) -> dict[str, Any]:
    return _text(variant) | {
        "hidden_states": latents(variant, 4).transpose(1, 2),
        "image_rotary_emb": angles(math.prod(VIDEO[variant]), 16),
    }


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


ENTRIES = (
    Tiny(
        name="HunyuanVideoTransformer3DModel",
        family="hunyuan_video",
        config={
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
        },
        call=_hunyuan,
        layout="BCFHW",
    ),
    Tiny(
        name="CogVideoXTransformer3DModel",
        family="cogvideox",
        config={
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
        },
        call=_cogvideox,
        layout="BFCHW",
    ),
    Tiny(
        name="LTXVideoTransformer3DModel",
        family="ltx",
        config={
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 3,
            "attention_head_dim": 12,
            "cross_attention_dim": 36,
            "num_layers": 3,
            "caption_channels": 32,
        },
        call=_ltx,
    ),
)
