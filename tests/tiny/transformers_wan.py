"""Wan and its relatives: video tokens see each other, and the text by cross-attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from .transformers_entry import BATCH, VIDEO, VIDEO_TEXT, Tiny, noise, step_time
from .transformers_video import latents

_WAN = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}


def _wan(variant: int) -> dict[str, Any]:
    return {
        "hidden_states": latents(variant, 16),
        "encoder_hidden_states": noise(BATCH, VIDEO_TEXT[variant], 32),
        "timestep": step_time(),
    }


def _chrono(variant: int) -> dict[str, Any]:
    """Two frames are further apart for it than two of many."""
    return _wan(variant) | {"encoder_hidden_states_image": noise(BATCH, 6, 24)}


def _sky(variant: int) -> dict[str, Any]:
    """Every frame has a time of its own."""
    frames = VIDEO[variant][0]
    times = step_time()[:, None] - 20.0 * torch.arange(frames)
    return _wan(variant) | {"timestep": times, "enable_diffusion_forcing": True}


def _vace(variant: int) -> dict[str, Any]:
    return _wan(variant) | {
        "control_hidden_states": noise(BATCH, 8, *latents(variant, 8).shape[2:], seed=1),
        "control_hidden_states_scale": torch.tensor([1.0, 0.8]),
    }


def _animate(variant: int) -> dict[str, Any]:
    """Pose for every frame but the first, four faces of 16 pixels for each of those."""
    video = latents(variant, 20)
    frames, rows, columns = video.shape[2:]
    return _wan(variant) | {
        "hidden_states": video,
        "encoder_hidden_states_image": noise(BATCH, 6, 24),
        "pose_hidden_states": noise(BATCH, 8, frames - 1, rows, columns),
        "face_pixel_values": noise(BATCH, 3, 4 * (frames - 1), 16, 16),
    }


def _animate2(variant: int) -> dict[str, Any]:
    """The pass over the reference, which fills the caches of the generation."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    video = latents(variant, 8)
    grid = torch.tensor([VIDEO[variant]] * BATCH)
    return {
        "hidden_states": [sample[:4] for sample in video],
        "condition_latents": [sample[4:] for sample in video],
        "encoder_hidden_states": [noise(VIDEO_TEXT[variant] - 2 * sample, 32) for sample in range(BATCH)],
        "timestep": step_time(),
        "kv_cache": WanAnimate2KVCache(3),
        "kv_cache_mode": "extract",
        "seq_len": math.prod(VIDEO[variant]),
        "offset_grid_sizes": grid,
    }


def _anyflow(variant: int) -> dict[str, Any]:
    """From one time to another; every frame has its own."""
    start = step_time()[:, None] - 20.0 * torch.arange(VIDEO[variant][0])
    return _wan(variant) | {
        "hidden_states": latents(variant, 16).transpose(1, 2),
        "timestep": start,
        "r_timestep": start / 2,
    }


def _far(variant: int) -> dict[str, Any]:
    """The first chunk of a video, with room for what the next ones will remember."""
    tokens = math.prod(VIDEO[variant])
    memory = {
        layer: {name: torch.zeros(2, BATCH, 3, tokens, 16) for name in ("compressed_cache", "full_cache")}
        for layer in range(3)
    }
    return _anyflow(variant) | {
        "chunk_partition": [VIDEO[variant][0]],
        "kv_cache": memory,
        "kv_cache_flag": {"num_cached_chunks": 0, "is_cache_step": False},
    }


def _helios(variant: int) -> dict[str, Any]:
    """Three memories of what came before, the older the coarser, in front of the frames to be denoised."""
    frames, rows, columns = VIDEO[variant]
    ages = torch.arange(8).expand(BATCH, -1)
    past = noise(BATCH, 16, 8, 2 * rows, 2 * columns, seed=1)
    return _wan(variant) | {
        "indices_hidden_states": 8 + torch.arange(frames).expand(BATCH, -1),
        "indices_latents_history_long": ages[:, :4],
        "indices_latents_history_mid": ages[:, 4:6],
        "indices_latents_history_short": ages[:, 6:],
        "latents_history_long": past[:, :, :4],
        "latents_history_mid": past[:, :, 4:6],
        "latents_history_short": past[:, :, 6:],
    }


_ANIMATE = {
    "in_channels": 20,
    "latent_channels": 8,
    "image_dim": 24,
    "added_kv_proj_dim": 36,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
    "motion_encoder_size": 16,
    "motion_style_dim": 16,
    "motion_dim": 4,
    "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
    "num_layers": 4,
}
_ANYFLOW = _WAN | {"attention_head_dim": 16}

ENTRIES = (
    Tiny(name="WanTransformer3DModel", family="wan", config=_WAN, call=_wan, layout="BCFHW"),
    Tiny(
        name="ChronoEditTransformer3DModel",
        family="wan",
        config=_WAN | {"image_dim": 24, "added_kv_proj_dim": 36},
        call=_chrono,
        layout="BCFHW",
    ),
    Tiny(name="SkyReelsV2Transformer3DModel", family="wan", config=_WAN, call=_sky, layout="BCFHW"),
    Tiny(
        name="WanVACETransformer3DModel",
        family="wan",
        config=_WAN | {"vace_layers": [0, 2], "vace_in_channels": 8},
        call=_vace,
        layout="BCFHW",
    ),
    Tiny(name="WanAnimateTransformer3DModel", family="wan", config=_WAN | _ANIMATE, call=_animate, layout="BCFHW"),
    Tiny(
        name="WanAnimate2Transformer3DModel",
        family="wan",
        config={
            "text_len": 48,
            "in_dim": 8,
            "dim": 36,
            "ffn_dim": 64,
            "freq_dim": 32,
            "text_dim": 32,
            "out_dim": 4,
            "num_heads": 3,
            "num_layers": 3,
            "use_img_emb": False,
        },
        call=_animate2,
        layout="CFHW",
    ),
    Tiny(name="AnyFlowTransformer3DModel", family="anyflow", config=_ANYFLOW, call=_anyflow, layout="BFCHW"),
    Tiny(name="AnyFlowFARTransformer3DModel", family="anyflow", config=_ANYFLOW, call=_far, layout="BFCHW"),
    Tiny(
        name="HeliosTransformer3DModel",
        family="helios",
        config={key: value for key, value in _WAN.items() if key != "rope_max_seq_len"} | {"rope_dim": (4, 4, 4)},
        call=_helios,
        layout="BCFHW",
    ),
)
