"""Transformers whose text and image are one sequence from the first block, or whose experts share the tokens out."""

from __future__ import annotations

from typing import Any

import torch

from .transformers_entry import BATCH, IMAGE, IMAGE_TEXT, Tiny, flow_time, noise, positions, ragged
from .transformers_image import latents


def _lumina2(variant: int) -> dict[str, Any]:
    text = IMAGE_TEXT[variant]
    return {
        "hidden_states": latents(variant, 4),
        "timestep": flow_time(),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_attention_mask": ragged(text).bool(),
    }


def _krea2(variant: int) -> dict[str, Any]:
    """Text comes as three layers of its encoder."""
    text = IMAGE_TEXT[variant]
    rows, columns = IMAGE[variant]
    return {
        "hidden_states": noise(BATCH, rows * columns, 16),
        "encoder_hidden_states": noise(BATCH, text, 3, 32),
        "encoder_attention_mask": ragged(text).bool(),
        "timestep": flow_time(),
        "position_ids": torch.cat([torch.zeros(text, 3), positions(rows, columns)]),
    }


def _ideogram(variant: int) -> dict[str, Any]:
    """One sequence from the start: padding, text, image; roles tell which is which."""
    text = IMAGE_TEXT[variant]
    rows, columns = IMAGE[variant]
    image = rows * columns
    spoken = ragged(text).flip(1)
    return {
        "hidden_states": noise(BATCH, text + image, 16),
        "encoder_hidden_states": noise(BATCH, text + image, 32),
        "timestep": flow_time(),
        "position_ids": torch.cat([positions(text, 1, 1), 50 + positions(rows, columns)]).expand(BATCH, -1, -1),
        "segment_ids": torch.cat([2 * spoken - 1, torch.ones(BATCH, image, dtype=torch.long)], dim=1),
        "indicator": torch.cat([3 * spoken, torch.full((BATCH, image), 2)], dim=1),
    }


def _omnigen(variant: int) -> dict[str, Any]:
    """Text, the time as one token, the image; text sees itself and what comes before, the image sees everything."""
    text = IMAGE_TEXT[variant]
    rows, columns = IMAGE[variant]
    length = text + 1 + rows * columns
    mask = torch.ones(length, length, dtype=torch.long).tril()
    mask[text + 1 :] = 1
    return {
        "hidden_states": latents(variant, 4),
        "timestep": flow_time(),
        "input_ids": torch.arange(BATCH * text).reshape(BATCH, text) % 30,
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": mask.expand(BATCH, -1, -1),
        "position_ids": torch.arange(length).expand(BATCH, -1),
    }


def _nucleus(variant: int) -> dict[str, Any]:
    text = IMAGE_TEXT[variant]
    rows, columns = IMAGE[variant]
    return {
        "hidden_states": noise(BATCH, rows * columns, 16),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_hidden_states_mask": ragged(text).bool(),
        "timestep": flow_time(),
        "img_shapes": [(1, rows, columns)] * BATCH,
    }


def _hidream(variant: int) -> dict[str, Any]:
    """35 tokens filled up to 64, and a square of 36. Every block sees a layer of the language model beside the rest."""
    text = (4, 6)[variant]
    rows, columns = ((5, 7), (6, 6))[variant]
    return {
        "hidden_states": noise(BATCH, 4, 2 * rows, 2 * columns),
        "timesteps": 1000 * flow_time(),
        "encoder_hidden_states_t5": noise(BATCH, text, 32),
        "encoder_hidden_states_llama3": noise(4, BATCH, text, 24),
        "pooled_embeds": noise(BATCH, 16),
    }


def _qwen21(variant: int) -> dict[str, Any]:
    """Slots in the text stand for four image tokens each; text comes first and does not see the image."""
    text = (13, 24)[variant]
    rows, columns = ((5, 8), (6, 8))[variant]
    mask = torch.zeros(BATCH, text + rows * columns // 4, dtype=torch.bool)
    mask[:, text:] = True
    return {
        "hidden_states": noise(BATCH, rows * columns, 16),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_hidden_states_mask": ragged(text),
        "timestep": flow_time(),
        "img_shapes": [[(1, rows, columns)]] * BATCH,
        "img_mask": mask,
    }


ENTRIES = (
    Tiny(
        name="Lumina2Transformer2DModel",
        family="lumina",
        config={
            "sample_size": 16,
            "in_channels": 4,
            "hidden_size": 48,
            "num_layers": 3,
            "num_refiner_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 8,
            "axes_dim_rope": (4, 4, 4),
            "axes_lens": (64, 32, 32),
            "cap_feat_dim": 32,
        },
        call=_lumina2,
        layout="BCHW",
    ),
    Tiny(
        name="Krea2Transformer2DModel",
        family="krea",
        config={
            "in_channels": 16,
            "num_layers": 3,
            "attention_head_dim": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 96,
            "timestep_embed_dim": 32,
            "text_hidden_dim": 32,
            "num_text_layers": 3,
            "text_num_attention_heads": 4,
            "text_num_key_value_heads": 4,
            "text_intermediate_size": 48,
            "axes_dims_rope": (4, 4, 4),
        },
        call=_krea2,
    ),
    Tiny(
        name="Ideogram4Transformer2DModel",
        family="ideogram",
        config={
            "in_channels": 16,
            "num_layers": 3,
            "attention_head_dim": 12,
            "num_attention_heads": 3,
            "intermediate_size": 64,
            "adaln_dim": 16,
            "llm_features_dim": 32,
            "mrope_section": (2, 2, 2),
        },
        call=_ideogram,
    ),
    Tiny(
        name="OmniGenTransformer2DModel",
        family="omnigen",
        config={
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "intermediate_size": 64,
            "num_layers": 3,
            "pad_token_id": 0,
            "vocab_size": 32,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 256,
            "rope_scaling": {"long_factor": [1.0] * 6, "short_factor": [1.0] * 6},
            "pos_embed_max_size": 16,
            "time_step_dim": 32,
        },
        call=_omnigen,
        layout="BCHW",
    ),
    Tiny(
        name="NucleusMoEImageTransformer2DModel",
        family="nucleus",
        config={
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 4, 4),
            "dense_moe_strategy": "leave_first_block_dense",
            "num_experts": 4,
            "moe_intermediate_dim": 32,
            "capacity_factors": 2.0,
        },
        call=_nucleus,
        empty=("gate_up_proj", "down_proj"),
    ),
    Tiny(
        name="HiDreamImageTransformer2DModel",
        family="hidream",
        config={
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 12,
            "num_attention_heads": 3,
            "caption_channels": [32, 24],
            "text_emb_dim": 16,
            "axes_dims_rope": (4, 4, 4),
            "max_resolution": (16, 16),
            "llama_layers": [0, 1, 2, 3],
            "force_inference_output": True,
        },
        call=_hidream,
        layout="BCHW",
    ),
    Tiny(
        name="QwenImage21Transformer2DModel",
        family="qwen",
        config={
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 3,
            "attention_head_dim": 12,
            "num_attention_heads": 3,
            "context_in_dim": 32,
            "axes_dims_rope": (4, 4, 4),
        },
        call=_qwen21,
    ),
)
