"""Pipelines that change images as they are told: text and images are read by a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers

from benchmarks.coverage.unets import UNETS
from tests.tiny import autoencoders, encoders, language_encoders, language_pipelines, sample_images, tokenizers
from tests.tiny.image_pipelines import PROMPT, SIZE
from tests.tiny.transformer_pipelines import flow_matching

from .entry import Built, Entry, Guidance, changed, derived
from .single_stream import longcat_parts, transformer

_SMALL = {"levels": 7, "width": 2, "blocks": 0}
"""An autoencoder that divides each side by 64: these pipelines scale their images to a megapixel."""


def _qwen(name: str, call: dict[str, Any]) -> Callable[[], Built]:
    return lambda: derived(language_pipelines.qwen_edit, name, call, vae=autoencoders.qwen(**_SMALL))


def _layered() -> Built:
    """The image is taken apart into layers, which the autoencoder sees with an alpha channel."""
    source = language_pipelines.qwen_edit()[0].transformer
    parts = {
        "vae": autoencoders.qwen(**_SMALL, latent_channels=8, channels=4),
        "transformer": changed(source, in_channels=32, out_channels=8, use_additional_t_cond=True),
    }
    parts["vae"].decoder.conv_out.weight.data.mul_(8)  # it cannot return latents, and pixels would hardly tell them
    call = {"layers": 2, "image": sample_images.scene().convert("RGBA"), "output_type": "pt", "true_cfg_scale": 16.0}
    return derived(language_pipelines.qwen_edit, "QwenImageLayeredPipeline", call, **parts)


def _longcat() -> Built:
    pipe = diffusers.LongCatImageEditPipeline(**longcat_parts(levels=7))
    pipe.tokenizer_max_length = 32
    return pipe, {"image": sample_images.scene(), "prompt": PROMPT, "negative_prompt": "blurred"}


def _joy_parts(name: str) -> dict[str, Any]:
    """Images have a megapixel, of which the autoencoder makes 16 x 16 latents."""
    return {
        "scheduler": flow_matching(),
        "vae": autoencoders.wan(**_SMALL, latent_channels=4),
        "text_encoder": language_encoders.qwen3_vl(),
        "tokenizer": tokenizers.qwen(),
        "transformer": transformer(name),
        "processor": encoders.ImageReader(tokenizers.qwen()),
    }


def _joy() -> Built:
    pipe = diffusers.JoyImageEditPipeline(**_joy_parts("JoyImageEditTransformer3DModel"))
    return pipe, {"image": sample_images.scene(), "prompt": PROMPT, "negative_prompt": "blurred"}


def _joy_plus() -> Built:
    pipe = diffusers.JoyImageEditPlusPipeline(**_joy_parts("JoyImageEditPlusTransformer3DModel"))
    return pipe, {
        "images": [sample_images.scene(), sample_images.scene().transpose(0)],
        "prompt": PROMPT,
        "negative_prompt": "blurred",
    }


def _qwen21() -> Built:
    pipe = diffusers.QwenImage21Pipeline(
        scheduler=flow_matching(use_dynamic_shifting=True),
        vae=autoencoders.qwen21(),
        text_encoder=language_encoders.qwen3_vl(),
        processor=encoders.ImageReader(tokenizers.mistral()),
        transformer=transformer("QwenImage21Transformer2DModel"),
    )
    call = {"prompt": PROMPT, "negative_prompt": "blurred", "true_cfg_scale": 4.0, "output_resolution": 128}
    return pipe, call | {"num_inference_steps": 3}  # of which the first fills a cache


def _dreamlite(name: str, call: dict[str, Any]) -> Callable[[], Built]:
    """The image that is changed is beside the noise, in columns; without, there are two branches."""

    def build() -> Built:
        unet = UNETS["DreamLiteUNetModel"].build()
        parts = {
            "text_encoder": language_encoders.qwen3_vl(unet.config.cross_attention_dim),
            "tokenizer": tokenizers.qwen(),
            "processor": encoders.ImageReader(tokenizers.qwen()),
            "vae": diffusers.AutoencoderTiny(
                encoder_block_out_channels=(8,) * 4,
                decoder_block_out_channels=(8,) * 4,
                num_encoder_blocks=(1,) * 4,
                num_decoder_blocks=(1,) * 4,
            ),
            "unet": unet,
            "scheduler": flow_matching(use_dynamic_shifting=True),
        }
        return getattr(diffusers, name)(**parts), {"prompt": PROMPT, **SIZE, **call}

    return build


_BUILD: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "QwenImageEditInpaintPipeline": (
        _qwen("QwenImageEditInpaintPipeline", {"mask_image": sample_images.mask(), "strength": 0.99}),
        "a call each",
    ),
    "QwenImageEditPlusPipeline": (_qwen("QwenImageEditPlusPipeline", {}), "a call each"),
    "QwenImageLayeredPipeline": (_layered, "a call each"),
    "QwenImage21Pipeline": (_qwen21, "a call each"),
    "LongCatImageEditPipeline": (_longcat, "a call each"),
    "JoyImageEditPipeline": (_joy, "a call each"),
    "JoyImageEditPlusPipeline": (_joy_plus, "a call each"),
    "DreamLitePipeline": (_dreamlite("DreamLitePipeline", {}), "one call"),
    "DreamLiteMobilePipeline": (_dreamlite("DreamLiteMobilePipeline", {"image": sample_images.scene()}), "none"),
}
_ONE_PROMPT = (
    "JoyImageEditPlusPipeline",
    "QwenImageEditPlusPipeline",
    "QwenImageLayeredPipeline",
    "LongCatImageEditPipeline",
    "DreamLitePipeline",
    "DreamLiteMobilePipeline",
)
"""Pipelines that take one prompt only, or images that are for all of them."""

ENTRIES = tuple(
    Entry(name=name, build=build, guidance=guidance, prompts="" if name in _ONE_PROMPT else "prompt")
    for name, (build, guidance) in _BUILD.items()
)
