"""Video pipelines in small in which tokens or frames have a time of their own: what is given is not noisy."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from . import autoencoders, encoders, sample_images, tokenizers
from .image_pipelines import PROMPT, Built
from .transformer_pipelines import flow_matching
from .video_transformer_pipelines import VIDEO, ltx_parts, wan_parts, wan_transformer

_AUDIO = {"mel_bins": 8, "output_channels": 2}


def wan_ti2v() -> Built:
    """Wan 2.2 5B: every token has a time."""
    pipe = diffusers.WanPipeline(**wan_parts(), transformer=wan_transformer(), expand_timesteps=True)
    return pipe, dict(VIDEO)


def wan_ti2v_image() -> Built:
    """The first frame is the image."""
    pipe = diffusers.WanImageToVideoPipeline(**wan_parts(), transformer=wan_transformer(), expand_timesteps=True)
    return pipe, VIDEO | {"image": sample_images.scene(64, 64)}


def skyreels_forcing() -> Built:
    """Every frame has a time and a scheduler."""
    transformer = diffusers.SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=64,
        inject_sample_info=False,
    )
    pipe = diffusers.SkyReelsV2DiffusionForcingPipeline(**wan_parts(), transformer=transformer)
    return pipe, VIDEO | {"base_num_frames": 9, "ar_step": 1, "causal_block_size": 1}


def ltx_image() -> Built:
    return diffusers.LTXImageToVideoPipeline(**ltx_parts()), VIDEO | {"image": sample_images.scene(64, 64)}


def ltx_condition() -> Built:
    """Images at two moments, whose tokens come before those of the video."""
    given = [LTXVideoCondition(image=sample_images.scene(64, 64), frame_index=index) for index in (0, 8)]
    parts = ltx_parts() | {"scheduler": flow_matching()}
    return diffusers.LTXConditionPipeline(**parts), VIDEO | {"conditions": given, "num_frames": 17}


def _ltx2_parts() -> dict[str, Any]:
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1,),
        num_res_blocks=1,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        **_AUDIO,
    )
    vocoder = LTX2Vocoder(
        in_channels=_AUDIO["mel_bins"] * _AUDIO["output_channels"],
        hidden_channels=16,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )
    connectors = LTX2TextConnectors(
        caption_channels=32,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
        rope_type="split",
    )
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=32,
        rope_type="split",
    )
    return {
        "scheduler": flow_matching(use_dynamic_shifting=True),
        "vae": autoencoders.ltx2(),
        "audio_vae": audio_vae,
        "text_encoder": encoders.gemma(),
        "tokenizer": copy.deepcopy(tokenizers.llama()),  # the pipeline changes it
        "connectors": connectors,
        "transformer": transformer,
        "vocoder": vocoder,
    }


_LTX2_CALL: dict[str, Any] = {
    "prompt": PROMPT,
    "height": 32,
    "width": 32,
    "num_frames": 9,
    "frame_rate": 25.0,
    "max_sequence_length": 16,
    "spatio_temporal_guidance_blocks": [1],
}
"""Guidance of four kinds: four calls of the denoiser in a step, the first of two branches."""


def ltx2() -> Built:
    return diffusers.LTX2Pipeline(**_ltx2_parts()), dict(_LTX2_CALL)


def ltx2_image() -> Built:
    return diffusers.LTX2ImageToVideoPipeline(**_ltx2_parts()), _LTX2_CALL | {"image": sample_images.scene(32, 32)}


def ltx2_condition() -> Built:
    frames = sample_images.scene(32, 32)
    uncompressed = {"crf": 0} if hasattr(LTX2VideoCondition, "crf") else {}  # older diffusers never compress
    given = [LTX2VideoCondition(frames=frames, index=index, **uncompressed) for index in (0, 1)]
    return diffusers.LTX2ConditionPipeline(**_ltx2_parts()), _LTX2_CALL | {"conditions": given}
