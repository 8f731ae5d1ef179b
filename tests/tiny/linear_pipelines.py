"""Pipelines in small whose denoisers have linear attention: Sana, of images and of videos."""

from __future__ import annotations

import copy
from typing import Any

import diffusers

from . import autoencoders, encoders, sample_images, tokenizers
from .image_pipelines import PROMPT, Built
from .transformer_pipelines import flow_matching

CALL = {"prompt": PROMPT, "complex_human_instruction": None, "max_sequence_length": 64}
SIZE = {"height": 32, "width": 32, "use_resolution_binning": False}
VIDEO_SIZE = {"height": 64, "width": 64, "frames": 9, "use_resolution_binning": False}


def deep_compression() -> Any:
    """Divides rows and columns by 2, without a distribution of latents."""
    return diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )


def _widths(channels: int) -> dict[str, Any]:
    return {
        "in_channels": channels,
        "out_channels": channels,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 12,
        "cross_attention_dim": 24,
        "caption_channels": 32,
    }


def transformer(**more: Any) -> Any:
    return diffusers.SanaTransformer2DModel(**_widths(4), patch_size=1, sample_size=16, interpolation_scale=1, **more)


def language() -> dict[str, Any]:
    """What reads the text."""
    return {
        "text_encoder": encoders.gemma(),
        "tokenizer": copy.deepcopy(tokenizers.llama()),  # pipelines change it
    }


def _image_parts() -> dict[str, Any]:
    return language() | {"vae": deep_compression(), "transformer": transformer(), "scheduler": flow_matching()}


def sana() -> Built:
    call = CALL | SIZE | {"negative_prompt": "blurred", "guidance_scale": 4.5}
    return diffusers.SanaPipeline(**_image_parts()), call


def sana_sprint() -> Built:
    """Distilled: guidance is an embedding."""
    parts = {"transformer": transformer(guidance_embeds=True), "scheduler": diffusers.SCMScheduler()}
    return diffusers.SanaSprintPipeline(**_image_parts() | parts), CALL | SIZE


def sana_video() -> Built:
    transformer = diffusers.SanaVideoTransformer3DModel(**_widths(16), patch_size=(1, 2, 2), rope_max_seq_len=32)
    parts = language() | {"vae": autoencoders.wan(), "transformer": transformer, "scheduler": flow_matching()}
    call = CALL | VIDEO_SIZE | {"negative_prompt": "blurred", "guidance_scale": 4.5}
    return diffusers.SanaVideoPipeline(**parts), call


def sana_world() -> Built:
    """A camera moves through an image."""
    transformer = diffusers.SanaWMTransformer3DModel(
        in_channels=4,
        num_layers=2,
        hidden_size=48,
        num_attention_heads=3,
        softmax_every_n=2,
        linear_head_dim=16,
        chunk_plucker_channels=24,
        chunk_plucker_post_attn_blocks=2,
        caption_channels=32,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = language() | {"vae": autoencoders.ltx2(), "transformer": transformer, "scheduler": scheduler}
    call = {
        "prompt": PROMPT,
        "image": sample_images.scene(64, 64),
        "action": "w-8",
        "intrinsics": [60.0, 60.0, 32.0, 32.0],
        "chi_prompt": ["Describe."],
        "height": 32,
        "width": 32,
        "num_frames": 9,
        "guidance_scale": 4.5,
        "max_sequence_length": 48,
    }
    return diffusers.SanaWMPipeline(**parts), call
