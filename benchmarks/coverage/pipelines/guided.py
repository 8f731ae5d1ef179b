"""Pipelines whose guidance is a part of theirs, which says what their branches are."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.guiders import AdaptiveProjectedMixGuidance

from tests.tiny import encoders, sample_images, tokenizers
from tests.tiny.image_pipelines import PROMPT
from tests.tiny.transformer_pipelines import flow_matching

from .entry import Built, Entry
from .single_stream import transformer


def _hunyuan_image_parts(**config: Any) -> dict[str, Any]:
    return {
        "scheduler": flow_matching(shift=3.0),
        "text_encoder": encoders.qwen(),
        "tokenizer": tokenizers.qwen(),
        "transformer": transformer("HunyuanImageTransformer2DModel", **config),
        "guider": AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1),
    }


def _hunyuan_image() -> Built:
    """The autoencoder divides each side by 32 in earnest, here by 8."""
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=128,
        scaling_factor=0.75,
    )
    pipe = diffusers.HunyuanImagePipeline(
        **_hunyuan_image_parts(guidance_embeds=False, text_embed_2_dim=32),
        vae=vae,
        text_encoder_2=encoders.t5(),
        tokenizer_2=tokenizers.t5(),
        ocr_guider=None,
    )
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 200, 16
    return pipe, {"prompt": PROMPT, "negative_prompt": "blurred", "height": 64, "width": 64}


def _hunyuan_refiner() -> Built:
    """Its patches are of images that it is given, in channels beside the noise."""
    vae = diffusers.AutoencoderKLHunyuanImageRefiner(
        latent_channels=4,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        temporal_compression_ratio=2,
    )
    sizes = {"in_channels": 16, "out_channels": 8, "patch_size": (1, 1, 1), "rope_axes_dim": (4, 4, 4)}
    pipe = diffusers.HunyuanImageRefinerPipeline(**_hunyuan_image_parts(**sizes), vae=vae)
    pipe.tokenizer_max_length = 200
    return pipe, {"prompt": PROMPT, "image": sample_images.scene(64, 64), "height": 64, "width": 64}


ENTRIES = (
    Entry(name="HunyuanImagePipeline", build=_hunyuan_image, guidance="a call each"),
    Entry(name="HunyuanImageRefinerPipeline", build=_hunyuan_refiner, guidance="a call each"),
)
