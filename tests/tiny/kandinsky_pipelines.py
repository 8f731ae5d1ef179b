"""Kandinsky 2 and 3 in small: UNets whose attention sees image and text at once, or with norms of their own."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from . import autoencoders, encoders, sample_images, tokenizers
from .image_pipelines import PROMPT, Built

WIDTH = 32
_LATENT = {"height": 64, "width": 64, "output_type": "latent"}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _decoder_unet(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 8,
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "cross_attention_dim": WIDTH,
        "encoder_hid_dim": WIDTH,
        "encoder_hid_dim_type": "image_proj",
        "addition_embed_type": "image",
        "attention_head_dim": 8,
        "norm_num_groups": 8,
        "resnet_time_scale_shift": "scale_shift",
    }
    return diffusers.UNet2DConditionModel(**(options | changes))


def _decoder_parts(unet: Any, norm_type: str = "spatial") -> dict[str, Any]:
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, clip_sample=False, set_alpha_to_one=False, steps_offset=1
    )
    return {"unet": unet, "scheduler": scheduler, "movq": autoencoders.vq(latent_channels=4, norm_type=norm_type)}


def _message() -> dict[str, Any]:
    """What the prior would say of a prompt."""
    return {"image_embeds": _noise(1, WIDTH), "negative_image_embeds": _noise(1, WIDTH).flip(-1)}


def _prior_parts() -> dict[str, Any]:
    return {
        "prior": diffusers.PriorTransformer(
            num_attention_heads=2, attention_head_dim=12, embedding_dim=WIDTH, num_layers=1
        ),
        "image_encoder": encoders.clip_vision(WIDTH),
        "text_encoder": encoders.clip_text_projected(WIDTH),
        "tokenizer": tokenizers.clip(),
        "scheduler": diffusers.UnCLIPScheduler(prediction_type="sample"),
        "image_processor": encoders.clip_image_processor(),
    }


def _with_prior(parts: dict[str, Any]) -> dict[str, Any]:
    """The components of a pipeline made of two: a prior says of text what the decoder draws."""
    return parts | {f"prior_{name}": part for name, part in _prior_parts().items()}


def prior21() -> Built:
    return diffusers.KandinskyPriorPipeline(**_prior_parts()), {"prompt": PROMPT, "output_type": "pt"}


def prior22() -> Built:
    return diffusers.KandinskyV22PriorPipeline(**_prior_parts()), {"prompt": PROMPT, "output_type": "pt"}


def _multilingual_parts(in_channels: int = 4) -> dict[str, Any]:
    unet = _decoder_unet(
        in_channels=in_channels,
        encoder_hid_dim_type="text_image_proj",
        addition_embed_type="text_image",
    )
    return _decoder_parts(unet) | {
        "text_encoder": encoders.multilingual_clip(WIDTH),
        "tokenizer": tokenizers.xlm_roberta(),
    }


def kandinsky21() -> Built:
    """What it draws is always decoded."""
    call = {**_message(), **_LATENT, "prompt": PROMPT, "output_type": "pt", "guidance_scale": 2.0}
    return diffusers.KandinskyPipeline(**_multilingual_parts()), call


def kandinsky21_combined() -> Built:
    call = {"prompt": PROMPT, **_LATENT, "prior_num_inference_steps": 2, "output_type": "pt"}
    return diffusers.KandinskyCombinedPipeline(**_with_prior(_multilingual_parts())), call


def kandinsky22() -> Built:
    return diffusers.KandinskyV22Pipeline(**_decoder_parts(_decoder_unet())), {**_message(), **_LATENT}


def kandinsky22_combined() -> Built:
    pipe = diffusers.KandinskyV22CombinedPipeline(**_with_prior(_decoder_parts(_decoder_unet())))
    return pipe, {"prompt": PROMPT, **_LATENT, "prior_num_inference_steps": 2}


def kandinsky22_img2img() -> Built:
    call = {**_message(), **_LATENT, "image": sample_images.scene(64, 64), "strength": 0.9}
    return diffusers.KandinskyV22Img2ImgPipeline(**_decoder_parts(_decoder_unet())), call


def kandinsky22_inpaint() -> Built:
    call = {**_message(), **_LATENT, "image": sample_images.scene(64, 64), "mask_image": sample_images.mask(64, 64)}
    return diffusers.KandinskyV22InpaintPipeline(**_decoder_parts(_decoder_unet(in_channels=9))), call


def kandinsky22_controlnet() -> Built:
    """The depth map goes into the UNet whole, eight times as large as the latent. What it draws is always decoded."""
    unet = _decoder_unet(in_channels=8, addition_embed_type="image_hint")
    call = {**_message(), "height": 64, "width": 64, "hint": _noise(1, 3, 64, 64), "output_type": "pt"}
    return diffusers.KandinskyV22ControlnetPipeline(**_decoder_parts(unet, "group")), call


def _third_parts() -> dict[str, Any]:
    unet = diffusers.Kandinsky3UNet(
        time_embedding_dim=32,
        groups=4,
        attention_head_dim=8,
        layers_per_block=2,
        block_out_channels=(32, 32),
        cross_attention_dim=WIDTH,
        encoder_hid_dim=WIDTH,
    )
    scheduler = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", clip_sample=True, thresholding=False)
    movq = autoencoders.vq(latent_channels=4, norm_type="spatial")
    return {
        "tokenizer": tokenizers.t5(),
        "text_encoder": encoders.t5(WIDTH),
        "unet": unet,
        "scheduler": scheduler,
        "movq": movq,
    }


def kandinsky3() -> Built:
    return diffusers.Kandinsky3Pipeline(**_third_parts()), {"prompt": PROMPT, **_LATENT}


def kandinsky3_img2img() -> Built:
    call = {"prompt": PROMPT, "image": sample_images.scene(64, 64), "strength": 0.9, "output_type": "latent"}
    return diffusers.Kandinsky3Img2ImgPipeline(**_third_parts()), call
