"""Transformer pipelines in small that a ControlNet steers."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders, encoders, sample_images, tokenizers
from .image_pipelines import PROMPT, SIZE, Built
from .transformer_pipelines import flow_matching

_FLUX = {
    "patch_size": 1,
    "in_channels": 16,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}


def flux_controlnet_img2img() -> Built:
    """The ControlNet begins as it would after training: with weights, which `build` gives it."""
    pipe = diffusers.FluxControlNetImg2ImgPipeline(
        scheduler=flow_matching(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoders.kl(quant_conv=False, scaling_factor=0.36),
        text_encoder=encoders.clip_text(),
        tokenizer=tokenizers.clip(),
        text_encoder_2=encoders.t5(),
        tokenizer_2=tokenizers.t5(),
        transformer=diffusers.FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True, **_FLUX),
        controlnet=diffusers.FluxControlNetModel(num_layers=2, num_single_layers=2, **_FLUX),
    )
    images_given: dict[str, Any] = {
        "image": sample_images.scene(),
        "control_image": sample_images.scene(),
        "strength": 0.99,
    }
    return pipe, {"prompt": PROMPT, "max_sequence_length": 32, **SIZE, **images_given}
