"""Stable Diffusion and Stable Diffusion XL in small, with networks beside the UNet: T2I-Adapters, ControlNet-XS."""

from __future__ import annotations

from typing import Any

import diffusers

from . import pictures
from .image_pipelines import PROMPT, SIZE, Built, sd_parts, sd_unet, xl_parts, xl_unet


def _adapter(kind: str, downscale_factor: int) -> Any:
    """States at the levels of the UNet: three of Stable Diffusion, of Stable Diffusion XL one more of each kind."""
    channels = [16, 32, 32] if kind == "full_adapter" else [16, 32, 32, 32]
    return diffusers.T2IAdapter(
        in_channels=3, channels=channels, num_res_blocks=1, downscale_factor=downscale_factor, adapter_type=kind
    )


def sd_t2i() -> Built:
    parts = sd_parts(sd_unet())
    pipe = diffusers.StableDiffusionAdapterPipeline(**parts, adapter=_adapter("full_adapter", 8))
    return pipe, {"prompt": PROMPT, "image": pictures.scene(), **SIZE}


def sd_t2i_multi() -> Built:
    adapters = [_adapter("full_adapter", 8), _adapter("full_adapter", 8)]
    pipe = diffusers.StableDiffusionAdapterPipeline(**sd_parts(sd_unet()), adapter=adapters)
    scene = pictures.scene()
    scales = {"adapter_conditioning_scale": [0.7, 0.4]}
    return pipe, {"prompt": PROMPT, "image": [scene, scene.transpose(0)], **scales, **SIZE}


def _xl_parts() -> dict[str, Any]:
    return {name: part for name, part in xl_parts(xl_unet()).items() if name != "add_watermarker"}


def sdxl_t2i() -> Built:
    pipe = diffusers.StableDiffusionXLAdapterPipeline(**_xl_parts(), adapter=_adapter("full_adapter_xl", 16))
    return pipe, {"prompt": PROMPT, "image": pictures.scene(), **SIZE}


def sdxl_t2i_multi() -> Built:
    adapters = diffusers.MultiAdapter([_adapter("full_adapter_xl", 16), _adapter("full_adapter_xl", 16)])
    pipe = diffusers.StableDiffusionXLAdapterPipeline(**_xl_parts(), adapter=adapters)
    scene = pictures.scene()
    scales = {"adapter_conditioning_scale": [0.7, 0.4]}
    return pipe, {"prompt": PROMPT, "image": [scene, scene.transpose(0)], **scales, **SIZE}


def sd_inpaint_4() -> Built:
    """Inpainting without a UNet made for it: what is not painted again is put back after every step."""
    call = {"prompt": PROMPT, "image": pictures.scene(), "mask_image": pictures.mask(), "strength": 1.0, **SIZE}
    return diffusers.StableDiffusionInpaintPipeline(**sd_parts(sd_unet())), call


def _controlled(unet: Any) -> Any:
    return diffusers.ControlNetXSAdapter.from_unet(
        unet, size_ratio=0.5, conditioning_embedding_out_channels=(8, 8, 16, 16), learn_time_embedding=True
    )


def sd_controlnet_xs() -> Built:
    unet = sd_unet(layers_per_block=2, use_linear_projection=True)
    parts = sd_parts(unet)
    pipe = diffusers.StableDiffusionControlNetXSPipeline(**parts, controlnet=_controlled(unet))
    return pipe, {"prompt": PROMPT, "image": pictures.scene(), **SIZE}


def sdxl_controlnet_xs() -> Built:
    unet = xl_unet(layers_per_block=2, transformer_layers_per_block=1)
    pipe = diffusers.StableDiffusionXLControlNetXSPipeline(**xl_parts(unet), controlnet=_controlled(unet))
    return pipe, {"prompt": PROMPT, "image": pictures.scene(), **SIZE}
