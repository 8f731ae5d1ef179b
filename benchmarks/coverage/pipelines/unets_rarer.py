"""Pipelines around Stable Diffusion's UNet that see an image's embedding, enlarge latents, or tell what is where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import diffusers

from tests.tiny import encoders, image_pipelines, sample_images, tokenizers

from .entry import Built, Entry, changed, derived


def prior(**changes: Any) -> Any:
    """Makes the embedding of an image from that of a text."""
    options: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "embedding_dim": 32}
    return diffusers.PriorTransformer(**options | changes)


def _embedded() -> dict[str, Any]:
    """A UNet that takes a noisy embedding of an image, and what makes it noisy."""
    unet = changed(
        image_pipelines.sd()[0].unet, class_embed_type="projection", projection_class_embeddings_input_dim=64
    )
    return {
        "unet": unet,
        "image_normalizer": diffusers.pipelines.stable_diffusion.StableUnCLIPImageNormalizer(32),
        "image_noising_scheduler": diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
    }


def _unclip() -> Built:
    parts = {
        "prior": prior(),
        "prior_tokenizer": tokenizers.clip(),
        "prior_text_encoder": encoders.clip_text_projected(),
        "prior_scheduler": diffusers.UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample"),
    }
    call = {"prior_num_inference_steps": 2}
    return derived(image_pipelines.sd, "StableUnCLIPPipeline", call, **_embedded(), **parts)


def _unclip_image() -> Built:
    parts = {"image_encoder": encoders.clip_vision(), "feature_extractor": encoders.clip_image_processor()}
    call = {"image": sample_images.scene()}
    return derived(image_pipelines.sd, "StableUnCLIPImg2ImgPipeline", call, **_embedded(), **parts)


def _latent_upscale() -> Built:
    """Its UNet reads the text's embedding as a time, and predicts one channel more than the latents have."""
    changes = {
        "in_channels": 8,
        "out_channels": 5,
        "time_cond_proj_dim": 128 + 32,
        "resnet_time_scale_shift": "scale_shift",
    }
    parts = {
        "unet": changed(image_pipelines.sd()[0].unet, **changes),
        "scheduler": diffusers.EulerDiscreteScheduler(prediction_type="sample"),
    }
    call = {"image": sample_images.scene()}
    return derived(image_pipelines.sd, "StableDiffusionLatentUpscalePipeline", call, **parts)


def _marigold(name: str, settings: Mapping[str, Any], targets: int = 1) -> Callable[[], Built]:
    """What is told of an image is in latents of its own, as many as `targets`, beside those of the image."""

    def build() -> Built:
        unet = changed(image_pipelines.sd()[0].unet, in_channels=4 * (1 + targets), out_channels=4 * targets)
        call = {"image": sample_images.scene(), "processing_resolution": 128, "output_type": "np", "prompt": None}
        parts = {"unet": unet, "scheduler": diffusers.DDIMScheduler(clip_sample=False), **settings}
        return derived(image_pipelines.sd, name, call, **parts)

    return build


_DEPTH = {"prediction_type": "depth", "scale_invariant": True, "shift_invariant": True}
_INTRINSICS = {"prediction_type": "intrinsics", "target_properties": {"target_names": ["albedo", "roughness"]}}
_MARIGOLD = {
    "MarigoldDepthPipeline": _marigold("MarigoldDepthPipeline", _DEPTH),
    "MarigoldNormalsPipeline": _marigold("MarigoldNormalsPipeline", {"prediction_type": "normals"}),
    "MarigoldIntrinsicsPipeline": _marigold("MarigoldIntrinsicsPipeline", _INTRINSICS, targets=2),
}

ENTRIES = (
    Entry(name="StableUnCLIPPipeline", build=_unclip),
    Entry(name="StableUnCLIPImg2ImgPipeline", build=_unclip_image),
    Entry(name="StableDiffusionLatentUpscalePipeline", build=_latent_upscale),
    *(Entry(name=name, build=build, guidance="none", prompts="") for name, build in _MARIGOLD.items()),
)
