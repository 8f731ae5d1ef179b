"""Image transformers in small whose text, if any, is read by CLIP or T5: two blocks of some 32 channels."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

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


def dit() -> Built:
    """Images of a class: no text, and its result is always an image."""
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        attention_bias=True,
        sample_size=16,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )
    pipe = diffusers.DiTPipeline(
        transformer=transformer,
        vae=autoencoders.kl(),
        scheduler=diffusers.DDIMScheduler(),
        id2label={0: "red house", 1: "blue boat"},
    )
    return pipe, {"class_labels": [1]}


def chroma() -> Built:
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
    pipe = diffusers.ChromaPipeline(
        scheduler=flow_matching(shift=3.0),
        vae=autoencoders.kl(quant_conv=False, scaling_factor=0.36),
        text_encoder=encoders.t5(),
        tokenizer=tokenizers.t5(),
        transformer=transformer,
    )
    return pipe, {"prompt": PROMPT, "negative_prompt": "blurred", "max_sequence_length": 32, **SIZE}


def auraflow() -> Built:
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=32,
        caption_projection_dim=24,
        pos_embed_max_size=256,
    )
    with torch.no_grad():  # it has no biases, so that gates would be close to zero
        transformer.time_step_proj.linear_2.weight.mul_(20)
    pipe = diffusers.AuraFlowPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=encoders.umt5(),
        vae=autoencoders.kl(),
        transformer=transformer,
        scheduler=flow_matching(shift=1.73),
    )
    return pipe, {"prompt": PROMPT, "max_sequence_length": 32, **SIZE}
