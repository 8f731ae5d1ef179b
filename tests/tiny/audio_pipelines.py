"""Pipelines of sound and music in small: transformers over a sequence, and UNets over a spectrogram."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from . import audio_encoders, encoders, tokenizers
from .image_pipelines import PROMPT, Built
from .transformer_pipelines import flow_matching

_SECOND = 80
"""Samples of sound in a second."""
_STEP = 8
"""Samples in a step of the latent, so that 3.5 seconds are 35 steps."""
SECONDS = 3.5


def wave(seconds: float = SECONDS) -> torch.Tensor:
    """A tone on two channels (1, 2, samples) that gets higher."""
    time = torch.arange(int(seconds * _SECOND)) / _SECOND
    return torch.stack([torch.sin(5 * time**2), torch.cos(3 * time**2)])[None]


def _oobleck(channels: int) -> Any:
    return diffusers.AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        channel_multiples=[1, 2],
        decoder_channels=8,
        decoder_input_channels=channels,
        sampling_rate=_SECOND,
    )


def stable_audio() -> Built:
    transformer = diffusers.StableAudioDiTModel(
        sample_size=35,
        in_channels=8,
        out_channels=8,
        num_layers=2,
        attention_head_dim=12,
        num_attention_heads=6,
        num_key_value_attention_heads=3,
        cross_attention_dim=36,
        time_proj_dim=16,
        global_states_input_dim=64,
        cross_attention_input_dim=32,
    )
    pipe = diffusers.StableAudioPipeline(
        vae=_oobleck(8),
        text_encoder=encoders.t5(),
        projection_model=diffusers.StableAudioProjectionModel(
            text_encoder_dim=32, conditioning_dim=32, min_value=0, max_value=32
        ),
        tokenizer=tokenizers.t5(),
        transformer=transformer,
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(prediction_type="v_prediction", sigma_data=1.0),
    )
    return pipe, {"prompt": PROMPT, "audio_end_in_s": SECONDS}


def stable_audio3() -> Built:
    transformer = diffusers.StableAudio3DiTModel(
        io_channels=8,
        embed_dim=48,
        depth=2,
        num_heads=3,
        cond_token_dim=32,
        global_cond_dim=32,
        local_add_cond_dim=9,
        timestep_features_dim=16,
        num_memory_tokens=5,
    )
    vae = diffusers.AutoencoderSAME(
        patch_size=4,
        encoder_channels=8,
        encoder_c_mults=(2,),
        encoder_strides=(2,),
        encoder_transformer_depths=(1,),
        latent_dim=8,
        dim_heads=8,
        sampling_rate=_SECOND,
    )
    pipe = diffusers.StableAudio3Pipeline(
        vae=vae,
        text_encoder=encoders.t5(),
        tokenizer=tokenizers.t5(),
        duration_embedder=diffusers.StableAudio3DurationEmbedder(output_dim=32, fourier_dim=16),
        transformer=transformer,
        scheduler=flow_matching(),
    )
    return pipe, {"prompt": PROMPT, "duration": SECONDS, "guidance_scale": 3.0}


def ace_step() -> Built:
    """Two steps of the latent make a token."""
    width = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformer = diffusers.AceStepTransformer1DModel(
        **width, num_hidden_layers=2, head_dim=8, in_channels=18, audio_acoustic_hidden_dim=6, sliding_window=4
    )
    condition = diffusers.AceStepConditionEncoder(
        **width,
        text_hidden_dim=32,
        timbre_hidden_dim=6,
        num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
        head_dim=8,
        sliding_window=4,
    )
    pipe = diffusers.AceStepPipeline(
        vae=_oobleck(6),
        text_encoder=encoders.qwen3(),
        tokenizer=tokenizers.qwen(),
        transformer=transformer,
        condition_encoder=condition,
        scheduler=flow_matching(num_train_timesteps=1),
    )
    return pipe, {"prompt": PROMPT, "lyrics": "la la", "audio_duration": 4.8, "guidance_scale": 3.0}


def longcat() -> Built:
    vae = diffusers.LongCatAudioDiTVae(
        channels=8,
        c_mults=[1, 2],
        strides=[2, 4],
        latent_dim=8,
        encoder_latent_dim=16,
        downsampling_ratio=_STEP,
        sample_rate=_SECOND,
    )
    transformer = diffusers.LongCatAudioDiTTransformer(
        dit_dim=36, dit_depth=2, dit_heads=3, dit_text_dim=32, latent_dim=8
    )
    pipe = diffusers.LongCatAudioDiTPipeline(
        vae=vae, text_encoder=encoders.umt5(), tokenizer=tokenizers.t5(), transformer=transformer
    )
    return pipe, {"prompt": PROMPT, "negative_prompt": "noise", "audio_duration_s": SECONDS}


def _spectrogram_vae() -> Any:
    return diffusers.AutoencoderKL(
        in_channels=1,
        out_channels=1,
        latent_channels=4,
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=8,
    )


def _spectrogram_parts() -> dict[str, Any]:
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False
    )
    return {
        "vae": _spectrogram_vae(),
        "tokenizer": tokenizers.roberta(),
        "scheduler": scheduler,
        "vocoder": audio_encoders.hifi_gan(16),
    }


_MAP: dict[str, Any] = {
    "sample_size": 16,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "attention_head_dim": 4,
}


def audioldm() -> Built:
    """The whole prompt is one vector beside the time."""
    unet = diffusers.UNet2DConditionModel(
        **_MAP,
        cross_attention_dim=(16, 32),
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=32,
        class_embeddings_concat=True,
    )
    pipe = diffusers.AudioLDMPipeline(**_spectrogram_parts(), text_encoder=audio_encoders.clap_text(), unet=unet)
    return pipe, {"prompt": PROMPT}


def audioldm2() -> Built:
    """Attention to the spectrogram, to what a language model goes on with, and to the prompt."""
    unet = diffusers.AudioLDM2UNet2DConditionModel(**_MAP, cross_attention_dim=((None, 32, 32),) * 2)
    pipe = diffusers.AudioLDM2Pipeline(
        **_spectrogram_parts(),
        text_encoder=audio_encoders.clap(),
        text_encoder_2=encoders.t5(),
        projection_model=diffusers.AudioLDM2ProjectionModel(
            text_encoder_dim=32, text_encoder_1_dim=32, langauge_model_dim=32
        ),
        language_model=audio_encoders.gpt2(),
        tokenizer_2=tokenizers.t5(),
        feature_extractor=None,
        unet=unet,
    )
    return pipe, {"prompt": PROMPT}
