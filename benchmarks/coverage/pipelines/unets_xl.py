"""Pipelines of Stable Diffusion XL, all on one small UNet or one with other input channels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers

from tests.tiny import image_pipelines, sample_images
from tests.tiny.image_pipelines import SIZE

from .entry import CONTROL, IMAGE, MASKED, Built, Entry, builder, changed, derived, in_one_call
from .unets_sd import TWO_IMAGES, beside, two_adapters

_PAG = {"pag_scale": 2.0}
_xl = partial(builder, image_pipelines.sdxl)
"""What makes a pipeline of the components of Stable Diffusion XL."""


def _controlnet() -> Any:
    return diffusers.ControlNetModel.from_unet(
        image_pipelines.sdxl()[0].unet, conditioning_embedding_out_channels=(8, 8, 16, 16)
    )


def _union() -> Any:
    unet = image_pipelines.sdxl()[0].unet.config
    taken = (
        "down_block_types",
        "block_out_channels",
        "layers_per_block",
        "transformer_layers_per_block",
        "cross_attention_dim",
        "attention_head_dim",
        "use_linear_projection",
        "norm_num_groups",
        "addition_embed_type",
        "addition_time_embed_dim",
        "projection_class_embeddings_input_dim",
    )
    return diffusers.ControlNetUnionModel(
        **{name: unet[name] for name in taken},
        conditioning_embedding_out_channels=(8, 8, 16, 16),
        num_control_type=6,
        num_trans_channel=16,
        num_trans_head=4,
        num_trans_layer=1,
        num_proj_channel=16,
    )


def _adapters() -> Any:
    return two_adapters(adapter_type="full_adapter_xl", downscale_factor=16)


def _controlnet_xs() -> Built:
    call = {"image": sample_images.scene(), **SIZE}
    parts = beside(image_pipelines.sdxl()[0].unet)
    return derived(image_pipelines.sdxl, "StableDiffusionXLControlNetXSPipeline", call, **parts)


def _edit() -> Built:
    unet = changed(image_pipelines.sdxl()[0].unet, in_channels=8)
    call = {"image": sample_images.scene(), "image_guidance_scale": 1.5, **SIZE}
    return derived(image_pipelines.sdxl, "StableDiffusionXLInstructPix2PixPipeline", call, unet=unet)


_UNION = CONTROL | {"control_mode": 1}
_BUILD: dict[str, Callable[[], Built]] = {
    "StableDiffusionXLPipeline": image_pipelines.sdxl,
    "StableDiffusionXLImg2ImgPipeline": image_pipelines.sdxl_img2img,
    "StableDiffusionXLInpaintPipeline": _xl("StableDiffusionXLInpaintPipeline", MASKED),
    "StableDiffusionXLInstructPix2PixPipeline": _edit,
    "StableDiffusionXLControlNetPipeline": image_pipelines.sdxl_controlnet,
    "StableDiffusionXLControlNetImg2ImgPipeline": _xl(
        "StableDiffusionXLControlNetImg2ImgPipeline", IMAGE | CONTROL, controlnet=_controlnet
    ),
    "StableDiffusionXLControlNetInpaintPipeline": _xl(
        "StableDiffusionXLControlNetInpaintPipeline", MASKED | CONTROL, controlnet=_controlnet
    ),
    "StableDiffusionXLControlNetUnionPipeline": _xl(
        "StableDiffusionXLControlNetUnionPipeline", _UNION, controlnet=_union
    ),
    "StableDiffusionXLControlNetUnionImg2ImgPipeline": _xl(
        "StableDiffusionXLControlNetUnionImg2ImgPipeline", IMAGE | _UNION, controlnet=_union
    ),
    "StableDiffusionXLControlNetUnionInpaintPipeline": _xl(
        "StableDiffusionXLControlNetUnionInpaintPipeline", MASKED | _UNION, controlnet=_union
    ),
    "StableDiffusionXLControlNetXSPipeline": _controlnet_xs,
    "StableDiffusionXLAdapterPipeline": _xl("StableDiffusionXLAdapterPipeline", TWO_IMAGES, adapter=_adapters),
    "StableDiffusionXLPAGPipeline": _xl("StableDiffusionXLPAGPipeline", _PAG),
    "StableDiffusionXLPAGImg2ImgPipeline": _xl("StableDiffusionXLPAGImg2ImgPipeline", _PAG | IMAGE),
    "StableDiffusionXLPAGInpaintPipeline": _xl("StableDiffusionXLPAGInpaintPipeline", _PAG | MASKED),
    "StableDiffusionXLControlNetPAGPipeline": _xl(
        "StableDiffusionXLControlNetPAGPipeline", _PAG | {"image": sample_images.scene()}, controlnet=_controlnet
    ),
    "StableDiffusionXLControlNetPAGImg2ImgPipeline": _xl(
        "StableDiffusionXLControlNetPAGImg2ImgPipeline", _PAG | IMAGE | CONTROL, controlnet=_controlnet
    ),
}


_ONE_PROMPT = (
    "StableDiffusionXLAdapterPipeline",
    "StableDiffusionXLControlNetUnionImg2ImgPipeline",
    "StableDiffusionXLControlNetUnionInpaintPipeline",
    "StableDiffusionXLControlNetUnionPipeline",
)
"""A list of images is one for each adapter or mode of control, not for each prompt."""


ENTRIES = tuple(
    Entry(name=name, build=build, guidance=in_one_call(name), prompts="" if name in _ONE_PROMPT else "prompt")
    for name, build in _BUILD.items()
)
