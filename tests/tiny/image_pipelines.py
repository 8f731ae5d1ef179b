"""Stable Diffusion and Stable Diffusion XL in small: three levels, attention on two of them, a total stride of 4."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders, encoders, sample_images, tokenizers

PROMPT = "a small red house"
SIZE = {"height": 128, "width": 128}
_NO_CHECKER = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_XL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 32,
}

Built = tuple[Any, dict[str, Any]]


def sd_unet(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "sample_size": 16,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (16, 32, 32),
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
        "norm_num_groups": 8,
    }
    return diffusers.UNet2DConditionModel(**(options | changes))


def xl_unet(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "sample_size": 16,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (16, 32, 32),
        "layers_per_block": 1,
        "transformer_layers_per_block": (1, 1, 2),
        "cross_attention_dim": 64,
        "attention_head_dim": (2, 4, 4),
        "use_linear_projection": True,
        "norm_num_groups": 8,
        **_XL,
    }
    return diffusers.UNet2DConditionModel(**(options | changes))


def _controlnet(unet: Any) -> Any:
    return diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 8, 16, 16))


def sd_parts(unet: Any) -> dict[str, Any]:
    return {
        "vae": autoencoders.kl(),
        "text_encoder": encoders.clip_text(),
        "tokenizer": tokenizers.clip(),
        "unet": unet,
        "scheduler": diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, **_BETAS),
        **_NO_CHECKER,
    }


def xl_parts(unet: Any) -> dict[str, Any]:
    return {
        "vae": autoencoders.kl(scaling_factor=0.13025),
        "text_encoder": encoders.clip_text(),
        "text_encoder_2": encoders.clip_text_projected(),
        "tokenizer": tokenizers.clip(),
        "tokenizer_2": tokenizers.clip(),
        "unet": unet,
        "scheduler": diffusers.EulerDiscreteScheduler(timestep_spacing="leading", **_BETAS),
        "add_watermarker": False,
    }


def sd() -> Built:
    return diffusers.StableDiffusionPipeline(**sd_parts(sd_unet())), {"prompt": PROMPT, **SIZE}


def sd_img2img() -> Built:
    call = {"prompt": PROMPT, "image": sample_images.scene(), "strength": 1.0}
    return diffusers.StableDiffusionImg2ImgPipeline(**sd_parts(sd_unet())), call


def sd_inpaint() -> Built:
    call = {
        "prompt": PROMPT,
        "image": sample_images.scene(),
        "mask_image": sample_images.mask(),
        "strength": 1.0,
        **SIZE,
    }
    return diffusers.StableDiffusionInpaintPipeline(**sd_parts(sd_unet(in_channels=9))), call


def sd_controlnet() -> Built:
    unet = sd_unet()
    pipe = diffusers.StableDiffusionControlNetPipeline(**sd_parts(unet), controlnet=_controlnet(unet))
    return pipe, {"prompt": PROMPT, "image": sample_images.scene(), **SIZE}


def instruct_pix2pix() -> Built:
    """Three branches of guidance in one batch: text and image, image only, neither."""
    pipe = diffusers.StableDiffusionInstructPix2PixPipeline(**sd_parts(sd_unet(in_channels=8)))
    return pipe, {"prompt": PROMPT, "image": sample_images.scene(), "image_guidance_scale": 1.5}


def sdxl() -> Built:
    return diffusers.StableDiffusionXLPipeline(**xl_parts(xl_unet())), {"prompt": PROMPT, **SIZE}


def sdxl_img2img() -> Built:
    call = {"prompt": PROMPT, "image": sample_images.scene(), "strength": 0.99}
    return diffusers.StableDiffusionXLImg2ImgPipeline(**xl_parts(xl_unet())), call


def sdxl_inpaint() -> Built:
    call = {
        "prompt": PROMPT,
        "image": sample_images.scene(),
        "mask_image": sample_images.mask(),
        "strength": 0.99,
        **SIZE,
    }
    return diffusers.StableDiffusionXLInpaintPipeline(**xl_parts(xl_unet(in_channels=9))), call


def sdxl_controlnet() -> Built:
    unet = xl_unet()
    pipe = diffusers.StableDiffusionXLControlNetPipeline(**xl_parts(unet), controlnet=_controlnet(unet))
    return pipe, {"prompt": PROMPT, "image": sample_images.scene(), **SIZE}
