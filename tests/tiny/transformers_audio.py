"""Transformers of sound and music."""

from __future__ import annotations

from typing import Any

import torch

from .transformers_entry import AUDIO, BATCH, IMAGE_TEXT, Tiny, angles, flow_time, noise, ragged

_CODEBOOK_STEPS = (9, 14)


def _ace(variant: int) -> dict[str, Any]:
    """Two steps of the sound make a token; every other layer sees only the eight tokens around."""
    length = 2 * AUDIO[variant]
    return {
        "hidden_states": noise(BATCH, length, 6),
        "context_latents": noise(BATCH, length, 10),
        "encoder_hidden_states": noise(BATCH, IMAGE_TEXT[variant], 32),
        "timestep": flow_time(),
        "timestep_r": flow_time() / 2,
    }


def _stable(variant: int) -> dict[str, Any]:
    """A token for what holds for the whole stands in front."""
    length = AUDIO[variant] - 1
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
    length = AUDIO[variant] - 5
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
        "hidden_states": noise(BATCH, AUDIO[variant], 8),
        "encoder_hidden_states": noise(BATCH, text, 32),
        "encoder_attention_mask": ragged(text).bool(),
        "timestep": flow_time(),
        "attention_mask": torch.ones(BATCH, AUDIO[variant], dtype=torch.bool),
        "latent_cond": noise(BATCH, AUDIO[variant], 8, seed=1),
    }


def _music(variant: int) -> dict[str, Any]:
    """The condition has a token for each of the sound; the time stands in front as one more."""
    length = AUDIO[variant] - 1
    return {
        "hidden_states": noise(BATCH, 8, length),
        "timestep": flow_time(),
        "encoder_hidden_states": noise(BATCH, length, 16),
    }


def _depth(variant: int) -> dict[str, Any]:
    return {"inputs_embeds": noise(BATCH, _CODEBOOK_STEPS[variant], 24)}


def _video(variant: int) -> dict[str, Any]:
    """Two encodings, each with its mask."""
    text = IMAGE_TEXT[variant] // 2
    encodings = [(noise(BATCH, text, 24, seed=part), ragged(text).float()) for part in range(2)]
    return {
        "encodings_and_masks": encodings,
        "decoder_input_tokens": noise(BATCH, AUDIO[variant], 6),
        "decoder_noise_time": flow_time(),
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
        call=_video,
        tokens="decoder_input_tokens",
    ),
)
