"""Image transformers in small: two or three blocks of 32 channels."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders, encoders, tokenizers
from .image_pipelines import PROMPT, SIZE, Built


def flow_matching(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


def pixart() -> Built:
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=16,
        patch_size=2,
        caption_channels=32,
        use_additional_conditions=False,
    )
    pipe = diffusers.PixArtSigmaPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=encoders.t5(),
        vae=autoencoders.kl(),
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )
    plain = {"use_resolution_binning": False, "clean_caption": False, "max_sequence_length": 32}
    return pipe, {"prompt": PROMPT, **SIZE, **plain}


def sd3() -> Built:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=8,
        out_channels=8,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=24,
    )
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=flow_matching(shift=3.0),
        vae=autoencoders.kl(latent_channels=8, quant_conv=False, scaling_factor=1.53),
        text_encoder=encoders.clip_text_projected(),
        tokenizer=tokenizers.clip(),
        text_encoder_2=encoders.clip_text_projected(),
        tokenizer_2=tokenizers.clip(),
        text_encoder_3=encoders.t5(64),
        tokenizer_3=tokenizers.t5(),
    )
    return pipe, {"prompt": PROMPT, "max_sequence_length": 32, **SIZE}


def flux() -> Built:
    """Guidance with a negative prompt ("true" guidance) on top of the distilled one."""
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )
    pipe = diffusers.FluxPipeline(
        scheduler=flow_matching(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoders.kl(quant_conv=False, scaling_factor=0.36),
        text_encoder=encoders.clip_text(),
        tokenizer=tokenizers.clip(),
        text_encoder_2=encoders.t5(),
        tokenizer_2=tokenizers.t5(),
        transformer=transformer,
    )
    guidance = {"negative_prompt": "blurred", "true_cfg_scale": 3.0}
    return pipe, {"prompt": PROMPT, "max_sequence_length": 32, **SIZE, **guidance}


def qwen() -> Built:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    )
    pipe = diffusers.QwenImagePipeline(
        scheduler=flow_matching(use_dynamic_shifting=True, shift_terminal=0.02, base_shift=0.5, max_shift=0.9),
        vae=autoencoders.qwen(),
        text_encoder=encoders.qwen(),
        tokenizer=tokenizers.qwen(),
        transformer=transformer,
    )
    guidance = {"negative_prompt": "blurred", "true_cfg_scale": 4.0}
    return pipe, {"prompt": PROMPT, "max_sequence_length": 256, **SIZE, **guidance}
