"""Transformers of images with text in a stream of its own, or seen by cross-attention."""

from __future__ import annotations

from typing import Any

import torch

from .transformers_entry import BATCH, IMAGE, IMAGE_TEXT, Tiny, flow_time, noise, ragged, step_time


def latents(variant: int, channels: int, patch: int = 2) -> torch.Tensor:
    """An image latent (B, C, H, W) that makes `IMAGE[variant]` patches."""
    rows, columns = IMAGE[variant]
    return noise(BATCH, channels, patch * rows, patch * columns)


def _dit(variant: int) -> dict[str, Any]:
    """It takes squares only."""
    side = (10, 12)[variant]
    return {
        "hidden_states": noise(BATCH, 4, side, side),
        "timestep": step_time().long(),
        "class_labels": torch.tensor([3, 7]),
    }


def _pixart(variant: int) -> dict[str, Any]:
    text = IMAGE_TEXT[variant]
    return {
        "hidden_states": latents(variant, 4),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_attention_mask": ragged(text),
        "timestep": step_time(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _sd3(variant: int) -> dict[str, Any]:
    return {
        "hidden_states": latents(variant, 8),
        "encoder_hidden_states": noise(BATCH, IMAGE_TEXT[variant], 32),
        "pooled_projections": noise(BATCH, 24),
        "timestep": step_time(),
    }


def _qwen(variant: int) -> dict[str, Any]:
    rows, columns = IMAGE[variant]
    text = IMAGE_TEXT[variant]
    return {
        "hidden_states": noise(BATCH, rows * columns, 16),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_hidden_states_mask": ragged(text),
        "timestep": flow_time(),
        "img_shapes": [[(1, rows, columns)]] * BATCH,
    }


def _z_image(variant: int) -> dict[str, Any]:
    """35 and 96 tokens, the first filled up to 64 as the text is to 32: half of the one, a third of the other."""
    rows, columns = ((5, 7), (8, 12))[variant]
    return {
        "x": [noise(4, 1, 2 * rows, 2 * columns, seed=sample) for sample in range(BATCH)],
        "t": flow_time(),
        "cap_feats": [noise(text, 32) for text in (12, 24)],
    }


ENTRIES = (
    Tiny(
        name="DiTTransformer2DModel",
        family="dit",
        config={
            "num_attention_heads": 3,
            "attention_head_dim": 8,
            "out_channels": 8,
            "num_layers": 3,
            "norm_num_groups": 8,
            "sample_size": 12,
            "num_embeds_ada_norm": 10,
        },
        call=_dit,
        layout="BCHW",
    ),
    Tiny(
        name="PixArtTransformer2DModel",
        family="pixart",
        config={
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "num_layers": 3,
            "cross_attention_dim": 32,
            "sample_size": 16,
            "caption_channels": 32,
            "use_additional_conditions": False,
            "norm_num_groups": 8,
        },
        call=_pixart,
        layout="BCHW",
    ),
    Tiny(
        name="SD3Transformer2DModel",
        family="sd3",
        config={
            "sample_size": 16,
            "in_channels": 8,
            "out_channels": 8,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 3,
            "joint_attention_dim": 32,
            "caption_projection_dim": 24,
            "pooled_projection_dim": 24,
            "pos_embed_max_size": 24,
            "dual_attention_layers": (0, 1),
            "qk_norm": "rms_norm",
        },
        call=_sd3,
        layout="BCHW",
    ),
    Tiny(
        name="QwenImageTransformer2DModel",
        family="qwen",
        config={
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "joint_attention_dim": 32,
            "axes_dims_rope": (8, 4, 4),
        },
        call=_qwen,
    ),
    Tiny(
        name="ZImageTransformer2DModel",
        family="z_image",
        config={
            "in_channels": 4,
            "dim": 36,
            "n_layers": 3,
            "n_refiner_layers": 2,
            "n_heads": 3,
            "n_kv_heads": 3,
            "cap_feat_dim": 32,
            "axes_dims": (4, 4, 4),
            "axes_lens": (128, 32, 32),
        },
        call=_z_image,
        tokens="x",
        layout="CFHW",
    ),
)
