"""Kandinsky: channels come last, text passes through blocks of its own before the video sees it."""

from __future__ import annotations

from typing import Any

import torch

from .transformers_entry import BATCH, VIDEO, VIDEO_TEXT, Tiny, noise, ragged, step_time


def _video(variant: int, channels: int, patch: int = 2) -> torch.Tensor:
    """A video latent (B, F, H, W, C) that makes `VIDEO[variant]` patches of one frame each."""
    frames, rows, columns = VIDEO[variant]
    return noise(BATCH, frames, patch * rows, patch * columns, channels)


def _positions(variant: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.arange(size) for size in VIDEO[variant])


def _kandinsky5(variant: int) -> dict[str, Any]:
    text = VIDEO_TEXT[variant]
    return {
        "hidden_states": _video(variant, 4),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "timestep": step_time(),
        "pooled_projections": noise(BATCH, 16),
        "visual_rope_pos": _positions(variant),
        "text_rope_pos": torch.arange(text),
    }


def _kandinsky6(variant: int) -> dict[str, Any]:
    """With its sound, eleven tokens of it."""
    text = VIDEO_TEXT[variant]
    return {
        "hidden_states": _video(variant, 9),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_attention_mask": ragged(text).bool(),
        "timestep": step_time(),
        "pooled_projections": noise(BATCH, 16),
        "audio_hidden_states": noise(BATCH, 11, 6),
        "visual_rope_pos": _positions(variant),
    }


def _sr(variant: int) -> dict[str, Any]:
    """Rows and columns are multiples of eight, for its attention looks at blocks of eight by eight."""
    frames, rows, columns = ((3, 8, 8), (2, 8, 16))[variant]
    return {"hidden_states": noise(BATCH, frames, rows, columns, 9), "timestep": step_time()}


_CONFIG = {
    "in_text_dim": 32,
    "in_text_dim2": 16,
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "time_dim": 24,
    "model_dim": 36,
    "ff_dim": 64,
    "num_text_blocks": 2,
    "num_visual_blocks": 3,
    "axes_dims": (4, 4, 4),
}

ENTRIES = (
    Tiny(
        name="Kandinsky5Transformer3DModel",
        family="kandinsky",
        config=_CONFIG,
        call=_kandinsky5,
        layout="BFHWC",
    ),
    Tiny(
        name="Kandinsky6Transformer3DModel",
        family="kandinsky",
        config=_CONFIG | {"in_audio_dim": 6, "out_audio_dim": 6, "ca_rope": True, "cross_gates": True},
        call=_kandinsky6,
        layout="BFHWC",
    ),
    Tiny(
        name="Kandinsky6SRTransformer3DModel",
        family="kandinsky",
        config={
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "time_dim": 24,
            "model_dim": 48,
            "ff_dim": 64,
            "num_visual_blocks": 3,
            "axes_dims": (4, 6, 6),
            "nabla_window": (3, 1, 1),
        },
        call=_sr,
        layout="BFHWC",
    ),
)
