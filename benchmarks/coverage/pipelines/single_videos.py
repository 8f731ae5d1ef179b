"""Pipelines of video that are alone in their family: Allegro, EasyAnimate, Latte, Mochi, MotifVideo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from tests.tiny import autoencoders, encoders, sample_images, tokenizers, video_transformer_pipelines
from tests.tiny.image_pipelines import PROMPT
from tests.tiny.transformer_pipelines import flow_matching

from .entry import Built, Entry, Guidance

_VIDEO: dict[str, Any] = {"prompt": PROMPT, "height": 64, "width": 64, "num_frames": 9}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
_FRAMES, _SIDE = 9, 64


def _pixels(channels: int) -> torch.Tensor:
    """A video of smooth gradients (1, channels, frames, rows, columns) between 0 and 1."""
    ramps = torch.linspace(0, 1, _SIDE).view(-1, 1) * torch.linspace(0.2, 1, _FRAMES).view(-1, 1, 1)
    return ramps.expand(1, channels, _FRAMES, _SIDE, _SIDE).contiguous()


def _latte() -> Built:
    """Tokens of a frame see each other, then those at one place in all frames."""
    transformer = diffusers.LatteTransformer3DModel(
        **_HEADS,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=24,
        attention_bias=True,
        sample_size=16,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=32,
        video_length=4,
    )
    pipe = diffusers.LattePipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=encoders.t5(),
        vae=autoencoders.kl(),
        transformer=transformer,
        scheduler=diffusers.DDIMScheduler(),
    )
    call = {"prompt": PROMPT, "height": 128, "width": 128, "video_length": 4, "clean_caption": False}
    return pipe, call | {"negative_prompt": "blurred"}


def _mochi() -> Built:
    """The autoencoder's norms have 32 groups whatever its configuration says."""
    transformer = diffusers.MochiTransformer3DModel(
        **_HEADS,
        in_channels=12,
        out_channels=12,
        num_layers=2,
        pooled_projection_dim=16,
        text_embed_dim=32,
        time_embed_dim=16,
        max_sequence_length=32,
    )
    wide = (32, 32, 32, 32)
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=wide,
        decoder_block_out_channels=wide,
        layers_per_block=(1,) * 5,
        add_attention_block=(False,) * 5,
    )
    pipe = diffusers.MochiPipeline(
        scheduler=flow_matching(invert_sigmas=True),
        vae=vae,
        text_encoder=encoders.t5(),
        tokenizer=tokenizers.t5(),
        transformer=transformer,
    )
    return pipe, _VIDEO | {"num_frames": 13, "max_sequence_length": 32}


def _easy_animate(name: str, call: dict[str, Any], extra_channels: int = 0) -> Callable[[], Built]:
    """`extra_channels`: what is given comes beside the latents."""

    def build() -> Built:
        transformer = diffusers.EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4 + extra_channels,
            out_channels=4,
            patch_size=2,
            num_layers=2,
            mmdit_layers=1,
            text_embed_dim=32,
            time_embed_dim=16,
            add_norm_text_encoder=True,
            resize_inpaint_mask_directly=False,  # which is the only way that works
        )
        vae = diffusers.AutoencoderKLMagvit(
            latent_channels=4,
            block_out_channels=[8, 8, 8, 8],
            layers_per_block=1,
            norm_num_groups=2,
            spatial_group_norm=False,
        )
        pipe = getattr(diffusers, name)(
            vae=vae,
            text_encoder=encoders.qwen(),
            tokenizer=tokenizers.mistral(),
            transformer=transformer,
            scheduler=flow_matching(),
        )
        return pipe, _VIDEO | {"negative_prompt": "blurred"} | call

    return build


def _text_and_sight() -> Any:
    """An encoder of text that reads images as well."""
    from transformers import T5Gemma2Encoder, T5Gemma2EncoderConfig

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = shape | {"vocab_size": 264, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
    vision = shape | {"hidden_size": 24, "image_size": 28, "patch_size": 14, "num_attention_heads": 2}
    beats = {"image_token_index": 262, "boi_token_index": 260, "eoi_token_index": 261, "mm_tokens_per_image": 4}
    kinds: dict[str, Any] = {"text_config": text | {"dropout_rate": 0.0}, "vision_config": vision}
    return T5Gemma2Encoder(T5Gemma2EncoderConfig(**kinds, **beats))


def _motif(name: str, call: dict[str, Any]) -> Callable[[], Built]:
    """Text and video in two streams, then in one; guidance is an object of its own."""

    def build() -> Built:
        from transformers import SiglipImageProcessor

        transformer = diffusers.MotifVideoTransformer3DModel(
            **_HEADS,
            in_channels=33,
            out_channels=16,
            num_layers=1,
            num_single_layers=2,
            num_decoder_layers=1,
            text_embed_dim=32,
            image_embed_dim=24,
            rope_axes_dim=(4, 4, 4),
            enable_text_cross_attention_dual=True,
            enable_text_cross_attention_single=True,
        )
        pipe = getattr(diffusers, name)(
            scheduler=flow_matching(),
            vae=autoencoders.wan(),
            text_encoder=_text_and_sight(),
            tokenizer=tokenizers.qwen(),
            transformer=transformer,
            guider=diffusers.ClassifierFreeGuidance(guidance_scale=4.0),
            feature_extractor=SiglipImageProcessor(size={"height": 28, "width": 28}),
        )
        return pipe, _VIDEO | {"max_sequence_length": 32} | call

    return build


_INPAINTED = {"video": _pixels(3), "mask_video": 255.0 * (_pixels(1) > 0.5)}
_BUILD: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "AllegroPipeline": (video_transformer_pipelines.allegro, "one call"),
    "LattePipeline": (_latte, "one call"),
    "MochiPipeline": (_mochi, "one call"),
    "EasyAnimatePipeline": (_easy_animate("EasyAnimatePipeline", {}), "one call"),
    "EasyAnimateInpaintPipeline": (_easy_animate("EasyAnimateInpaintPipeline", _INPAINTED, 8), "one call"),
    "MotifVideoPipeline": (_motif("MotifVideoPipeline", {}), "a call each"),
    "MotifVideoImage2VideoPipeline": (
        _motif("MotifVideoImage2VideoPipeline", {"image": sample_images.scene(64, 64)}),
        "a call each",
    ),
}

_ONE_AT_A_TIME = ("EasyAnimatePipeline", "EasyAnimateInpaintPipeline", "MotifVideoImage2VideoPipeline")
"""They take one image, or one negative prompt, for all prompts, and then fail with several."""

ENTRIES = tuple(
    Entry(name=name, build=build, guidance=guidance, prompts="" if name in _ONE_AT_A_TIME else "prompt")
    for name, (build, guidance) in _BUILD.items()
)
