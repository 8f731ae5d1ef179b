"""Stable Diffusion and Stable Diffusion XL in small, beside their UNets adapters of several kinds."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from . import sample_images
from .image_pipelines import PROMPT, SIZE, Built, sd_parts, sd_unet, xl_parts, xl_unet

SEEN = 16
"""How wide an image is as an IP-Adapter is given it."""


def _adapter(kind: str, downscale_factor: int) -> Any:
    """States at the levels of the UNet: three of Stable Diffusion, of Stable Diffusion XL one more of each kind."""
    channels = [16, 32, 32] if kind == "full_adapter" else [16, 32, 32, 32]
    return diffusers.T2IAdapter(
        in_channels=3, channels=channels, num_res_blocks=1, downscale_factor=downscale_factor, adapter_type=kind
    )


def sd_t2i() -> Built:
    parts = sd_parts(sd_unet())
    pipe = diffusers.StableDiffusionAdapterPipeline(**parts, adapter=_adapter("full_adapter", 8))
    return pipe, {"prompt": PROMPT, "image": sample_images.scene(), **SIZE}


def sd_t2i_multi() -> Built:
    adapters = [_adapter("full_adapter", 8), _adapter("full_adapter", 8)]
    pipe = diffusers.StableDiffusionAdapterPipeline(**sd_parts(sd_unet()), adapter=adapters)
    scene = sample_images.scene()
    scales = {"adapter_conditioning_scale": [0.7, 0.4]}
    return pipe, {"prompt": PROMPT, "image": [scene, scene.transpose(0)], **scales, **SIZE}


def _xl_parts() -> dict[str, Any]:
    return {name: part for name, part in xl_parts(xl_unet()).items() if name != "add_watermarker"}


def sdxl_t2i() -> Built:
    pipe = diffusers.StableDiffusionXLAdapterPipeline(**_xl_parts(), adapter=_adapter("full_adapter_xl", 16))
    return pipe, {"prompt": PROMPT, "image": sample_images.scene(), **SIZE}


def sdxl_t2i_multi() -> Built:
    adapters = diffusers.MultiAdapter([_adapter("full_adapter_xl", 16), _adapter("full_adapter_xl", 16)])
    pipe = diffusers.StableDiffusionXLAdapterPipeline(**_xl_parts(), adapter=adapters)
    scene = sample_images.scene()
    scales = {"adapter_conditioning_scale": [0.7, 0.4]}
    return pipe, {"prompt": PROMPT, "image": [scene, scene.transpose(0)], **scales, **SIZE}


def sd_inpaint_4() -> Built:
    """Inpainting without a UNet made for it: what is not painted again is put back after every step."""
    call = {
        "prompt": PROMPT,
        "image": sample_images.scene(),
        "mask_image": sample_images.mask(),
        "strength": 1.0,
        **SIZE,
    }
    return diffusers.StableDiffusionInpaintPipeline(**sd_parts(sd_unet())), call


def _controlled(unet: Any) -> Any:
    return diffusers.ControlNetXSAdapter.from_unet(
        unet, size_ratio=0.5, conditioning_embedding_out_channels=(8, 8, 16, 16), learn_time_embedding=True
    )


def sd_controlnet_xs() -> Built:
    unet = sd_unet(layers_per_block=2, use_linear_projection=True)
    parts = sd_parts(unet)
    pipe = diffusers.StableDiffusionControlNetXSPipeline(**parts, controlnet=_controlled(unet))
    return pipe, {"prompt": PROMPT, "image": sample_images.scene(), **SIZE}


def sdxl_controlnet_xs() -> Built:
    unet = xl_unet(layers_per_block=2, transformer_layers_per_block=1)
    pipe = diffusers.StableDiffusionXLControlNetXSPipeline(**xl_parts(unet), controlnet=_controlled(unet))
    return pipe, {"prompt": PROMPT, "image": sample_images.scene(), **SIZE}


def _with_images(unet: Any, *, adapters: int) -> Any:
    """IP-Adapters in a UNet, with weights as their loader wants them."""
    unet._load_ip_adapter_weights([image_weights(unet) for _ in range(adapters)], low_cpu_mem_usage=False)
    return unet


def image_weights(unet: Any) -> dict[str, dict[str, torch.Tensor]]:
    """An IP-Adapter for a UNet, at random."""
    width = unet.config.cross_attention_dim
    projection = {"proj.weight": torch.randn(4 * width, SEEN), "proj.bias": torch.randn(4 * width)}
    layers = {}
    cross = [name.removesuffix(".processor") for name in unet.attn_processors if name.endswith("attn2.processor")]
    for number, name in enumerate(cross):
        shape = unet.get_submodule(name).to_q.out_features, width
        layers[f"{2 * number + 1}.to_k_ip.weight"] = torch.randn(shape) / width**0.5
        layers[f"{2 * number + 1}.to_v_ip.weight"] = torch.randn(shape) / width**0.5
    norm = {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    return {"image_proj": projection | norm, "ip_adapter": layers}


def _masked(height: int, width: int) -> dict[str, Any]:
    """What two adapters see: one two images, in the halves of the mask, one an image in a corner."""
    half = torch.zeros(1, 2, height, width)
    half[:, 0, :, : width // 2], half[:, 1, :, width // 2 :] = 1, 1
    corner = torch.zeros(1, 1, height, width)
    corner[..., : height // 3, : width // 3] = 1
    return {
        "ip_adapter_image_embeds": [torch.randn(2, 2, SEEN), torch.randn(2, 1, SEEN)],
        "cross_attention_kwargs": {"ip_adapter_masks": [half, corner]},
    }


def sd_ip_masks() -> Built:
    unet = _with_images(sd_unet(), adapters=2)
    pipe = diffusers.StableDiffusionPipeline(**sd_parts(unet))
    return pipe, {"prompt": PROMPT, **_masked(128, 128), **SIZE}


def sdxl_ip_masks() -> Built:
    """The mask is of another size and of other sides than the image."""
    unet = _with_images(xl_unet(), adapters=2)
    pipe = diffusers.StableDiffusionXLPipeline(**xl_parts(unet))
    return pipe, {"prompt": PROMPT, **_masked(96, 64), **SIZE, "height": 136}
