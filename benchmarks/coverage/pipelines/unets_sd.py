"""Pipelines of Stable Diffusion 1 and 2, all on one small UNet or one with other input channels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch

from tests.tiny import autoencoders, encoders, image_pipelines, sample_images
from tests.tiny.image_pipelines import SIZE

from .entry import CONTROL, IMAGE, MASKED, THREE, Built, Entry, builder, changed, derived

_PAG = {"pag_scale": 2.0}
sd = partial(builder, image_pipelines.sd)
"""What makes a pipeline of the components of Stable Diffusion."""


def controlnet() -> Any:
    """For the UNet of `image_pipelines.sd`."""
    return diffusers.ControlNetModel.from_unet(
        image_pipelines.sd()[0].unet, conditioning_embedding_out_channels=(8, 8, 16, 16)
    )


def two_adapters(*, adapter_type: str = "full_adapter", downscale_factor: int = 8) -> Any:
    """Adapters whose states are as large as the outputs of the levels of the UNet."""
    options = {"channels": [16, 32, 32], "num_res_blocks": 1, "downscale_factor": downscale_factor}
    return diffusers.MultiAdapter([diffusers.T2IAdapter(adapter_type=adapter_type, **options) for _ in range(2)])


def beside(unet: Any) -> dict[str, Any]:
    """A UNet with a ControlNet-XS, which needs two layers in every block."""
    unet = changed(unet, layers_per_block=2)
    controlnet = diffusers.ControlNetXSAdapter.from_unet(
        unet, size_ratio=0.5, conditioning_embedding_out_channels=(8, 8, 16, 16)
    )
    return {"unet": unet, "controlnet": controlnet}


def _controlnet_xs() -> Built:
    call = {"image": sample_images.scene(), **SIZE}
    parts = beside(image_pipelines.sd()[0].unet)
    return derived(image_pipelines.sd, "StableDiffusionControlNetXSPipeline", call, **parts)


def unet_of_sd(**changes: Any) -> Any:
    """The UNet of `image_pipelines.sd` with another configuration."""
    return changed(image_pipelines.sd()[0].unet, **changes)


def _depth() -> Built:
    call = IMAGE | {"depth_map": torch.linspace(0, 1, 128 * 128).view(1, 128, 128)}
    parts: dict[str, Any] = {"unet": unet_of_sd(in_channels=5), "depth_estimator": None, "feature_extractor": None}
    return derived(image_pipelines.sd, "StableDiffusionDepth2ImgPipeline", call, **parts)


def _depth_vae() -> Any:
    """Decodes colours and depth."""
    return changed(autoencoders.kl(), in_channels=6, out_channels=6)


def _variation() -> Built:
    parts = {"image_encoder": encoders.clip_vision(), "feature_extractor": encoders.clip_image_processor()}
    call = {"image": sample_images.scene(), "prompt": None, **SIZE}
    return derived(image_pipelines.sd, "StableDiffusionImageVariationPipeline", call, **parts)


def _upscale() -> Built:
    """Four times larger: the latents are as large as the image that is given."""
    unet = unet_of_sd(in_channels=7, num_class_embeds=1000)
    call = {"image": sample_images.scene(16, 24), "noise_level": 20}
    parts = {"unet": unet, "low_res_scheduler": diffusers.DDPMScheduler()}
    return derived(image_pipelines.sd, "StableDiffusionUpscalePipeline", call, **parts)


def _lcm(name: str, call: dict[str, Any]) -> Callable[[], Built]:
    """Guidance is an input of the UNet, so that there is one branch."""

    def build() -> Built:
        parts = {"unet": unet_of_sd(time_cond_proj_dim=32), "scheduler": diffusers.LCMScheduler()}
        return derived(image_pipelines.sd, name, call | {"num_inference_steps": 4}, **parts)

    return build


TWO_IMAGES: dict[str, Any] = {
    "image": [sample_images.scene(), sample_images.scene().transpose(1)],
    "adapter_conditioning_scale": [0.7, 0.4],
    **SIZE,
}
"""One for each of two adapters."""


ENTRIES = (
    Entry(name="StableDiffusionPipeline", build=image_pipelines.sd),
    Entry(name="StableDiffusionImg2ImgPipeline", build=image_pipelines.sd_img2img),
    Entry(name="StableDiffusionInpaintPipeline", build=sd("StableDiffusionInpaintPipeline", MASKED)),
    Entry(name="StableDiffusionInstructPix2PixPipeline", build=image_pipelines.instruct_pix2pix, guidance=THREE),
    Entry(name="StableDiffusionControlNetPipeline", build=image_pipelines.sd_controlnet),
    Entry(
        name="StableDiffusionControlNetImg2ImgPipeline",
        build=sd(
            "StableDiffusionControlNetImg2ImgPipeline",
            IMAGE | CONTROL,
            controlnet=controlnet,
        ),
    ),
    Entry(
        name="StableDiffusionControlNetInpaintPipeline",
        build=sd(
            "StableDiffusionControlNetInpaintPipeline",
            MASKED | CONTROL,
            controlnet=controlnet,
        ),
    ),
    Entry(name="StableDiffusionControlNetXSPipeline", build=_controlnet_xs),
    Entry(
        name="StableDiffusionAdapterPipeline",
        build=sd("StableDiffusionAdapterPipeline", TWO_IMAGES, adapter=two_adapters),
        prompts="",  # in plain diffusers too, states of adapters are those of one prompt
    ),
    Entry(name="StableDiffusionDepth2ImgPipeline", build=_depth),
    Entry(name="StableDiffusionImageVariationPipeline", build=_variation, prompts=""),
    Entry(name="StableDiffusionUpscalePipeline", build=_upscale),
    Entry(
        name="StableDiffusionLDM3DPipeline",
        build=sd("StableDiffusionLDM3DPipeline", {}, vae=_depth_vae),
        output_type="np",
    ),
    Entry(name="StableDiffusionSAGPipeline", build=sd("StableDiffusionSAGPipeline", {"sag_scale": 0.75})),
    Entry(
        name="StableDiffusionPanoramaPipeline",
        build=sd("StableDiffusionPanoramaPipeline", {"height": 128, "width": 192}),
    ),
    Entry(name="StableDiffusionPAGPipeline", build=sd("StableDiffusionPAGPipeline", _PAG), guidance=THREE),
    Entry(
        name="StableDiffusionPAGImg2ImgPipeline",
        build=sd("StableDiffusionPAGImg2ImgPipeline", _PAG | IMAGE),
        guidance=THREE,
    ),
    Entry(
        name="StableDiffusionPAGInpaintPipeline",
        build=sd("StableDiffusionPAGInpaintPipeline", _PAG | MASKED),
        guidance=THREE,
    ),
    Entry(
        name="StableDiffusionControlNetPAGPipeline",
        guidance=THREE,
        build=sd(
            "StableDiffusionControlNetPAGPipeline", _PAG | {"image": sample_images.scene()}, controlnet=controlnet
        ),
    ),
    Entry(
        name="StableDiffusionControlNetPAGInpaintPipeline",
        guidance=THREE,
        build=sd(
            "StableDiffusionControlNetPAGInpaintPipeline",
            _PAG | MASKED | CONTROL,
            controlnet=controlnet,
        ),
    ),
    Entry(
        name="LatentConsistencyModelPipeline",
        build=_lcm("LatentConsistencyModelPipeline", {"original_inference_steps": 50}),
        guidance="none",
    ),
    Entry(
        name="LatentConsistencyModelImg2ImgPipeline",
        build=_lcm("LatentConsistencyModelImg2ImgPipeline", IMAGE | {"original_inference_steps": 50}),
        guidance="none",
    ),
)
