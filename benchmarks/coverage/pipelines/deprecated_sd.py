"""Pipelines around the UNet of Stable Diffusion that diffusers no longer develops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from tests.tiny import encoders, image_pipelines, sample_images
from tests.tiny.image_pipelines import SIZE

from .entry import IMAGE, Built, Entry, derived
from .unets_sd import sd, unet_of_sd

_BETAS = {"beta_schedule": "scaled_linear", "clip_sample": False}
_BOXES = {"gligen_boxes": [[0.1, 0.1, 0.6, 0.5]], "gligen_phrases": ["a house"], "gligen_scheduled_sampling_beta": 1.0}


def _diffedit() -> Built:
    """What is kept of an image is given as its latents at every step."""
    generator = torch.Generator().manual_seed(3)
    call = {
        "mask_image": sample_images.mask(16, 16),
        "image_latents": torch.randn(1, 2, 4, 16, 16, generator=generator),
        "inpaint_strength": 1.0,
        "height": None,
        "width": None,
    }
    scheduler = diffusers.DDIMInverseScheduler(**_BETAS)
    return derived(image_pipelines.sd, "StableDiffusionDiffEditPipeline", call, inverse_scheduler=scheduler)


def _gligen() -> Built:
    unet = unet_of_sd(attention_type="gated")
    return derived(image_pipelines.sd, "StableDiffusionGLIGENPipeline", _BOXES, unet=unet)


def _gligen_image() -> Built:
    """The boxes are of texts and of images."""
    from diffusers.pipelines.stable_diffusion import CLIPImageProjection

    parts = {
        "unet": unet_of_sd(attention_type="gated-text-image"),
        "processor": encoders.clip_image_processor(),
        "image_encoder": encoders.clip_vision(),
        "image_project": CLIPImageProjection(hidden_size=32),
    }
    call = _BOXES | {"gligen_images": [sample_images.scene(64, 64)]}
    return derived(image_pipelines.sd, "StableDiffusionGLIGENTextImagePipeline", call, **parts)


def _cycle() -> Built:
    """From an image and what it shows to another prompt: two calls of the denoiser in one."""
    call = IMAGE | {"source_prompt": "a red house", "source_guidance_scale": 2.0, "eta": 0.1}
    return derived(image_pipelines.sd, "CycleDiffusionPipeline", call)


def _pix2pix_zero() -> Built:
    """Towards another word, by gradients through the denoiser."""
    generator = torch.Generator().manual_seed(3)
    words = {name: torch.randn(1, 77, 32, generator=generator) for name in ("source_embeds", "target_embeds")}
    parts = {"caption_generator": None, "caption_processor": None}
    scheduler = diffusers.DDIMInverseScheduler(**_BETAS)
    return derived(
        image_pipelines.sd, "StableDiffusionPix2PixZeroPipeline", words, **parts, inverse_scheduler=scheduler
    )


def _by_example() -> Built:
    """An image says what is painted into another one."""
    from diffusers.pipelines.deprecated.paint_by_example import PaintByExampleImageEncoder

    config = encoders.clip_vision().config
    parts = {
        "unet": unet_of_sd(in_channels=9),
        "image_encoder": PaintByExampleImageEncoder(config, proj_size=32),
        "feature_extractor": encoders.clip_image_processor(),
    }
    call = {
        "prompt": None,
        "image": sample_images.scene(),
        "mask_image": sample_images.mask(),
        "example_image": sample_images.scene(64, 64),
        **SIZE,
    }
    return derived(image_pipelines.sd, "PaintByExamplePipeline", call, **parts)


def _parallel() -> Any:
    return diffusers.DDIMParallelScheduler(**_BETAS)


_EDITS = {
    "editing_prompt": ["a green roof", "snow", "fog", "a barn"],
    "edit_warmup_steps": 0,
    "edit_guidance_scale": 4.0,
}
_BUILD: dict[str, Callable[[], Built]] = {
    "SemanticStableDiffusionPipeline": sd("SemanticStableDiffusionPipeline", _EDITS),
    "StableDiffusionGLIGENPipeline": _gligen,
    "StableDiffusionGLIGENTextImagePipeline": _gligen_image,
    "StableDiffusionModelEditingPipeline": sd("StableDiffusionModelEditingPipeline", {}),
    "StableDiffusionParadigmsPipeline": sd("StableDiffusionParadigmsPipeline", {"parallel": 2}, scheduler=_parallel),
    "StableDiffusionPix2PixZeroPipeline": _pix2pix_zero,
    "CycleDiffusionPipeline": _cycle,
}
_OF_ONE: dict[str, Callable[[], Built]] = {
    "StableDiffusionAttendAndExcitePipeline": sd(
        "StableDiffusionAttendAndExcitePipeline", {"token_indices": [2, 4], "thresholds": {0: 0.05}}
    ),
    "StableDiffusionDiffEditPipeline": _diffedit,
    "PaintByExamplePipeline": _by_example,
}
"""Of one prompt, or one image, at a time: of several their own calls fail."""

ENTRIES = (
    *(Entry(name=name, build=build) for name, build in _BUILD.items()),
    *(Entry(name=name, build=build, prompts="") for name, build in _OF_ONE.items()),
)
