"""Pipelines that draw pixels, without a VAE, in small: DeepFloyd IF and its upscalers, and UNets without conditions."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders, encoders, sample_images, tokenizers
from .image_pipelines import PROMPT, Built

SIDE = 32
_TEXT = {"prompt": PROMPT, "clean_caption": False, "output_type": "pt"}
_NO_CHECKER = {"safety_checker": None, "feature_extractor": None, "watermarker": None, "requires_safety_checker": False}


def _if_unet(**changes: Any) -> Any:
    """Attention to its own pixels and to the text at once, and ResNet blocks that resize."""
    options: dict[str, Any] = {
        "sample_size": SIDE,
        "in_channels": 3,
        "out_channels": 6,
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "encoder_hid_dim": 32,
        "attention_head_dim": 8,
        "norm_num_groups": 8,
        "act_fn": "gelu",
        "addition_embed_type": "text",
        "addition_embed_type_num_heads": 2,
        "cross_attention_norm": "group_norm",
        "resnet_time_scale_shift": "scale_shift",
    }
    return diffusers.UNet2DConditionModel(**(options | changes))


def _if_parts(unet: Any) -> dict[str, Any]:
    return {
        "text_encoder": encoders.t5(),
        "tokenizer": tokenizers.t5(),
        "unet": unet,
        "scheduler": diffusers.DDPMScheduler(
            beta_schedule="squaredcos_cap_v2", prediction_type="epsilon", variance_type="learned_range"
        ),
        **_NO_CHECKER,
    }


def _upscaler_parts() -> dict[str, Any]:
    unet = _if_unet(in_channels=6, class_embed_type="timestep")
    return _if_parts(unet) | {"image_noising_scheduler": diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2")}


def _image(side: int = SIDE) -> Any:
    return sample_images.scene(side, side)


def if_text() -> Built:
    return diffusers.IFPipeline(**_if_parts(_if_unet())), {**_TEXT}


def if_img2img() -> Built:
    return diffusers.IFImg2ImgPipeline(**_if_parts(_if_unet())), {**_TEXT, "image": _image(), "strength": 1.0}


def if_inpaint() -> Built:
    call = {**_TEXT, "image": _image(), "mask_image": sample_images.mask(SIDE, SIDE), "strength": 1.0}
    return diffusers.IFInpaintingPipeline(**_if_parts(_if_unet())), call


def if_upscale() -> Built:
    return diffusers.IFSuperResolutionPipeline(**_upscaler_parts()), {**_TEXT, "image": _image(SIDE // 2)}


def if_img2img_upscale() -> Built:
    call = {**_TEXT, "image": _image(SIDE // 2), "original_image": _image(), "strength": 1.0}
    return diffusers.IFImg2ImgSuperResolutionPipeline(**_upscaler_parts()), call


def if_inpaint_upscale() -> Built:
    call = {**_TEXT, "image": _image(SIDE // 2), "original_image": _image(), "strength": 1.0}
    call["mask_image"] = sample_images.mask(SIDE, SIDE)
    return diffusers.IFInpaintingSuperResolutionPipeline(**_upscaler_parts()), call


def _unconditional(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "sample_size": SIDE,
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "attention_head_dim": 8,
        "norm_num_groups": 8,
    }
    return diffusers.UNet2DModel(**(options | changes))


def ddpm() -> Built:
    return diffusers.DDPMPipeline(_unconditional(), diffusers.DDPMScheduler()), {"output_type": "pt"}


def ddim() -> Built:
    return diffusers.DDIMPipeline(_unconditional(), diffusers.DDIMScheduler()), {"output_type": "np", "eta": 0.5}


def consistency() -> Built:
    """Of the classes that it was trained for."""
    unet = _unconditional(num_class_embeds=10, resnet_time_scale_shift="scale_shift")
    scheduler = diffusers.CMStochasticIterativeScheduler(num_train_timesteps=40, sigma_min=0.002, sigma_max=80.0)
    return diffusers.ConsistencyModelPipeline(unet, scheduler), {"class_labels": 3, "output_type": "pt"}


def _vq(**changes: Any) -> Any:
    return autoencoders.vq(latent_channels=3, **changes)


def ldm_upscale() -> Built:
    """The small image is beside the noise, in channels."""
    scheduler = diffusers.DDIMScheduler(beta_start=0.0015, beta_end=0.0195, beta_schedule="scaled_linear")
    pipe = diffusers.LDMSuperResolutionPipeline(vqvae=_vq(), unet=_unconditional(in_channels=6), scheduler=scheduler)
    return pipe, {"image": _image(), "output_type": "np"}


def ldm_text() -> Built:
    from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel

    from .image_pipelines import sd_unet

    bert = LDMBertModel(
        LDMBertConfig(
            vocab_size=514,
            encoder_layers=1,
            encoder_ffn_dim=32,
            encoder_attention_heads=4,
            head_dim=8,
            d_model=32,
            pad_token_id=0,
        )
    )
    pipe = diffusers.LDMTextToImagePipeline(
        vqvae=autoencoders.kl(),
        bert=bert,
        tokenizer=tokenizers.clip(),
        unet=sd_unet(),
        scheduler=diffusers.DDIMScheduler(),
    )
    return pipe, {"prompt": PROMPT, "height": 128, "width": 128, "guidance_scale": 4.0, "output_type": "np"}
