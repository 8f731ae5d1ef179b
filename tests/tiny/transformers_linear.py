"""Transformers most of whose attention is linear: a sum over all tokens, not a softmax, and convolutions beside it."""

from __future__ import annotations

from typing import Any

import torch

from .transformers_entry import BATCH, IMAGE_TEXT, VIDEO, VIDEO_TEXT, Tiny, noise, ragged, step_time
from .transformers_image import latents as image_latents
from .transformers_video import latents as video_latents


def _text(length: int) -> dict[str, Any]:
    return {
        "encoder_hidden_states": noise(BATCH, length, 32),
        "encoder_attention_mask": ragged(length),
        "timestep": step_time(),
    }


def _sana(variant: int) -> dict[str, Any]:
    return _text(IMAGE_TEXT[variant]) | {"hidden_states": image_latents(variant, 4, patch=1)}


def _sana_video(variant: int) -> dict[str, Any]:
    return _text(VIDEO_TEXT[variant]) | {"hidden_states": video_latents(variant, 4)}


def _camera(frames: int) -> torch.Tensor:
    """A camera that moves to the right and forward (B, F, 20): pose, focal lengths, centre."""
    pose = torch.eye(4).repeat(BATCH, frames, 1, 1)
    pose[:, :, 0, 3] = 0.1 * torch.arange(frames)
    pose[:, :, 2, 3] = 0.2 * torch.arange(frames)
    lens = torch.tensor([5.0, 5, 3, 3]).expand(BATCH, frames, 4)
    return torch.cat([pose.flatten(2), lens], dim=2)


def _sana_world(variant: int) -> dict[str, Any]:
    """Every frame has a time; the camera is given as poses and as rays."""
    frames, rows, columns = VIDEO[variant]
    text = _text(VIDEO_TEXT[variant])
    return text | {
        "hidden_states": video_latents(variant, 8, patch=1),
        "encoder_hidden_states": text["encoder_hidden_states"][:, None],
        "timestep": (step_time()[:, None] - 20.0 * torch.arange(frames))[:, None],
        "camera_conditions": _camera(frames),
        "chunk_plucker": noise(BATCH, 6, frames, rows, columns),
    }


_SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 3,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 18,
    "cross_attention_dim": 36,
    "caption_channels": 32,
    "qk_norm": "rms_norm_across_heads",
}

ENTRIES = (
    Tiny(
        name="SanaTransformer2DModel",
        family="sana",
        config=_SANA | {"sample_size": 16, "interpolation_scale": 1},
        call=_sana,
        layout="BCHW",
    ),
    Tiny(
        name="SanaVideoTransformer3DModel",
        family="sana",
        config=_SANA | {"rope_max_seq_len": 32},
        call=_sana_video,
        layout="BCFHW",
    ),
    Tiny(
        name="SanaWMTransformer3DModel",
        family="sana",
        config={
            "in_channels": 8,
            "num_layers": 4,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "softmax_every_n": 2,
            "linear_head_dim": 16,
            "chunk_plucker_channels": 6,
            "chunk_plucker_post_attn_blocks": 4,
            "caption_channels": 32,
        },
        call=_sana_world,
        layout="BCFHW",
    ),
)
