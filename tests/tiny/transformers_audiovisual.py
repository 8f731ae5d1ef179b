"""Transformers of video and its sound, and those that put everything into one sequence."""

from __future__ import annotations

import math
from typing import Any

import torch

from .transformers_entry import BATCH, VIDEO, VIDEO_TEXT, Tiny, angles, noise, positions, ragged, step_time


def _ltx2(variant: int) -> dict[str, Any]:
    """With eleven tokens of sound."""
    frames, rows, columns = VIDEO[variant]
    text = VIDEO_TEXT[variant]
    return {
        "hidden_states": noise(BATCH, frames * rows * columns, 8),
        "audio_hidden_states": noise(BATCH, 11, 6),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "audio_encoder_hidden_states": noise(BATCH, text, 32, seed=1),
        "encoder_attention_mask": ragged(text),
        "audio_encoder_attention_mask": ragged(text),
        "timestep": step_time(),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "audio_num_frames": 11,
    }


def _h3(variant: int) -> dict[str, Any]:
    """One sequence of text, sound and video, whose time differs from that of the text."""
    text = VIDEO_TEXT[variant] - 11
    video = positions(*VIDEO[variant])
    kinds = torch.tensor([2] * text + [1] * 11 + [0] * len(video))
    order = torch.arange(len(kinds))
    return {
        "hidden_states": noise(1, len(video), 16),
        "audio_hidden_states": noise(1, 11, 6),
        "encoder_hidden_states": noise(1, text, 32),
        "timestep": torch.tensor([0.0, 700.0]),
        "timestep_indices": (kinds != 2).long(),
        "token_tags": kinds,
        "position_ids": torch.cat([positions(text + 11, 1, 1), 60 + video]),
        "text_indices": order[kinds == 2],
        "audio_indices": order[kinds == 1],
        "video_indices": order[kinds == 0],
    }


def _cosmos3(variant: int) -> dict[str, Any]:
    """Text sees what came before it; the video, of which every frame is noisy, sees everything."""
    shape = VIDEO[variant]
    frames, rows, columns = shape
    text, image = VIDEO_TEXT[variant], math.prod(shape)
    indexes = text + torch.arange(image)
    return {
        "input_ids": torch.arange(text) % 30,
        "text_indexes": torch.arange(text),
        "position_ids": torch.cat([positions(text, 1, 1), text + positions(*shape)]).T,
        "und_len": text,
        "sequence_length": text + image,
        "vision_tokens": [noise(1, 4, frames, 2 * rows, 2 * columns)],
        "vision_token_shapes": [shape],
        "vision_sequence_indexes": indexes,
        "vision_mse_loss_indexes": indexes,
        "vision_timesteps": torch.full((image,), 700.0),
        "vision_noisy_frame_indexes": [torch.arange(frames)],
    }


def _refiner(variant: int) -> dict[str, Any]:
    """LTX-2 without the sound, whose layers it has nonetheless; positions are given."""
    tokens = math.prod(VIDEO[variant])
    text = VIDEO_TEXT[variant]
    cosines, sines = angles(tokens, 36)
    return {
        "hidden_states": noise(BATCH, tokens, 8),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_attention_mask": ragged(text),
        "timestep": step_time(),
        "video_rotary_emb": (cosines.expand(BATCH, -1, -1), sines.expand(BATCH, -1, -1)),
    }


_LTX2 = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "cross_attention_dim": 36,
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 3,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 24,
    "num_layers": 3,
    "caption_channels": 32,
}

ENTRIES = (
    Tiny(name="LTX2VideoTransformer3DModel", family="ltx", config=_LTX2, call=_ltx2),
    Tiny(name="SanaWMLTX2RefinerTransformer3DModel", family="ltx", config=_LTX2, call=_refiner),
    Tiny(
        name="MiniMaxH3Transformer3DModel",
        family="minimax",
        config={
            "num_attention_heads": 3,
            "attention_head_dim": 12,
            "hidden_size": 24,
            "num_layers": 3,
            "ffn_dim": 48,
            "in_channels": 4,
            "audio_in_channels": 6,
            "text_dim": 32,
            "freq_dim": 16,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        call=_h3,
    ),
    Tiny(
        name="Cosmos3OmniTransformer",
        family="cosmos",
        config={
            "head_dim": 12,
            "hidden_size": 24,
            "intermediate_size": 48,
            "latent_channel": 4,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "patch_latent_dim": 16,
            "vocab_size": 32,
            "rope_axes_dim": (2, 2, 2),
        },
        call=_cosmos3,
        tokens="vision_tokens",
        layout="BCFHW",
    ),
)
