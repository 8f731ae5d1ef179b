"""Transformers of sound and music, and those of video that make its sound as well."""

from __future__ import annotations

import math
from typing import Any

import torch

from .transformers_entry import (
    BATCH,
    IMAGE_TEXT,
    SOUND,
    VIDEO,
    VIDEO_TEXT,
    Tiny,
    angles,
    flow_time,
    noise,
    positions,
    ragged,
    step_time,
)

_CODEBOOK_STEPS = (9, 14)


def _ace(variant: int) -> dict[str, Any]:
    """Two steps of the sound make a token; every other layer sees only the eight tokens around."""
    length = 2 * SOUND[variant]
    return {
        "hidden_states": noise(BATCH, length, 6),
        "context_latents": noise(BATCH, length, 10),
        "encoder_hidden_states": noise(BATCH, IMAGE_TEXT[variant], 32),
        "timestep": flow_time(),
        "timestep_r": flow_time() / 2,
    }


def _stable(variant: int) -> dict[str, Any]:
    """A token for what holds for the whole stands in front."""
    length = SOUND[variant] - 1
    text = IMAGE_TEXT[variant]
    return {
        "hidden_states": noise(BATCH, 8, length),
        "timestep": flow_time(),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "global_hidden_states": noise(BATCH, 1, 16),
        "rotary_embedding": angles(length + 1, 6),
    }


def _stable3(variant: int) -> dict[str, Any]:
    """Five tokens of memory stand in front."""
    length = SOUND[variant] - 5
    text = IMAGE_TEXT[variant]
    return {
        "hidden_states": noise(BATCH, 8, length),
        "timestep": flow_time(),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_attention_mask": ragged(text),
        "global_hidden_states": noise(BATCH, 16),
        "local_add_cond": noise(BATCH, 9, length),
    }


def _longcat(variant: int) -> dict[str, Any]:
    text = IMAGE_TEXT[variant]
    return {
        "hidden_states": noise(BATCH, SOUND[variant], 8),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_attention_mask": ragged(text).bool(),
        "timestep": flow_time(),
        "attention_mask": torch.ones(BATCH, SOUND[variant], dtype=torch.bool),
        "latent_cond": noise(BATCH, SOUND[variant], 8, seed=1),
    }


def _music(variant: int) -> dict[str, Any]:
    """The condition has a token for each of the sound; the time stands in front as one more."""
    length = SOUND[variant] - 1
    return {
        "hidden_states": noise(BATCH, 8, length),
        "timestep": flow_time(),
        "encoder_hidden_states": noise(BATCH, length, 16),
    }


def _depth(variant: int) -> dict[str, Any]:
    return {"inputs_embeds": noise(BATCH, _CODEBOOK_STEPS[variant], 24)}


def _film(variant: int) -> dict[str, Any]:
    """Two encodings, each with its mask."""
    text = IMAGE_TEXT[variant] // 2
    encodings = [(noise(BATCH, text, 24, seed=part), ragged(text).float()) for part in range(2)]
    return {
        "encodings_and_masks": encodings,
        "decoder_input_tokens": noise(BATCH, SOUND[variant], 6),
        "decoder_noise_time": flow_time(),
    }


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
    places = text + torch.arange(image)
    return {
        "input_ids": torch.arange(text) % 30,
        "text_indexes": torch.arange(text),
        "position_ids": torch.cat([positions(text, 1, 1), text + positions(*shape)]).T,
        "und_len": text,
        "sequence_length": text + image,
        "vision_tokens": [noise(1, 4, frames, 2 * rows, 2 * columns)],
        "vision_token_shapes": [shape],
        "vision_sequence_indexes": places,
        "vision_mse_loss_indexes": places,
        "vision_timesteps": torch.full((image,), 700.0),
        "vision_noisy_frame_indexes": [torch.arange(frames)],
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
    Tiny(
        name="AceStepTransformer1DModel",
        family="ace_step",
        config={
            "hidden_size": 36,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "in_channels": 16,
            "audio_acoustic_hidden_dim": 6,
            "sliding_window": 4,
            "encoder_hidden_size": 32,
        },
        call=_ace,
    ),
    Tiny(
        name="StableAudioDiTModel",
        family="stable_audio",
        config={
            "sample_size": 64,
            "in_channels": 8,
            "out_channels": 8,
            "num_layers": 3,
            "attention_head_dim": 12,
            "num_attention_heads": 6,
            "num_key_value_attention_heads": 3,
            "cross_attention_dim": 36,
            "time_proj_dim": 16,
            "global_states_input_dim": 16,
            "cross_attention_input_dim": 32,
        },
        call=_stable,
        layout="BCS",
    ),
    Tiny(
        name="StableAudio3DiTModel",
        family="stable_audio",
        config={
            "io_channels": 8,
            "embed_dim": 48,
            "depth": 3,
            "num_heads": 3,
            "cond_token_dim": 32,
            "global_cond_dim": 16,
            "local_add_cond_dim": 9,
            "timestep_features_dim": 16,
            "num_memory_tokens": 5,
        },
        call=_stable3,
        layout="BCS",
    ),
    Tiny(
        name="LongCatAudioDiTTransformer",
        family="longcat",
        config={"dit_dim": 36, "dit_depth": 3, "dit_heads": 3, "dit_text_dim": 32, "latent_dim": 8},
        call=_longcat,
    ),
    Tiny(
        name="MiniMaxMusic3Transformer1DModel",
        family="minimax",
        config={
            "in_channels": 8,
            "condition_dim": 16,
            "num_layers": 3,
            "num_attention_heads": 3,
            "attention_head_dim": 12,
            "ff_inner_dim": 64,
            "rotary_dim": 6,
            "fourier_embedding_dim": 16,
        },
        call=_music,
        layout="BCS",
    ),
    Tiny(
        name="MiniMaxMusic3RVQDepthDecoder",
        family="minimax",
        config={
            "hidden_size": 24,
            "num_layers": 3,
            "num_attention_heads": 3,
            "intermediate_size": 48,
            "audio_vocab_size": 16,
            "num_codebooks": 4,
        },
        call=_depth,
        tokens="inputs_embeds",
        isolated="a token sees those before it only",
    ),
    Tiny(
        name="T5FilmDecoder",
        family="film",
        config={
            "input_dims": 6,
            "targets_length": 64,
            "d_model": 24,
            "num_layers": 3,
            "num_heads": 3,
            "d_kv": 8,
            "d_ff": 48,
        },
        call=_film,
        tokens="decoder_input_tokens",
    ),
    Tiny(name="LTX2VideoTransformer3DModel", family="ltx", config=_LTX2, call=_ltx2),
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
