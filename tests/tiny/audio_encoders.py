"""Encoders of text, and what makes sound of a spectrogram, for pipelines of sound: two layers, 32 wide."""

from __future__ import annotations

from typing import Any


def _clap_text_config(width: int) -> Any:
    from transformers import ClapTextConfig

    return ClapTextConfig(
        vocab_size=261,
        hidden_size=width,
        intermediate_size=64,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=90,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )


def clap_text(width: int = 32) -> Any:
    from transformers import ClapTextModelWithProjection

    return ClapTextModelWithProjection(_clap_text_config(width))


def clap(width: int = 32) -> Any:
    """Texts and sounds; nobody asks it of a sound."""
    from transformers import ClapAudioConfig, ClapConfig, ClapModel

    audio = ClapAudioConfig(
        spec_size=64,
        window_size=4,
        num_mel_bins=64,
        patch_size=2,
        patch_embeds_hidden_size=8,
        depths=[1, 1],
        num_attention_heads=[1, 1],
        num_hidden_layers=1,
        hidden_size=16,
        projection_dim=width,
    )
    return ClapModel(ClapConfig(text_config=_clap_text_config(width), audio_config=audio, projection_dim=width))


def gpt2(width: int = 32) -> Any:
    """It goes on for eight tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=width, n_head=4, n_layer=2, vocab_size=100, n_ctx=200, n_positions=200, max_new_tokens=8)
    return GPT2LMHeadModel(config)


def hifi_gan(bins: int) -> Any:
    """Sound of a spectrogram of so many bins, 16 samples of each row."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    config = SpeechT5HifiGanConfig(
        model_in_dim=bins,
        sampling_rate=1600,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        normalize_before=False,
        initializer_range=0.3,
    )
    return SpeechT5HifiGan(config)
