"""Wuerstchen, Stable Cascade and aMUSEd in small: depthwise convolutions with norms over the whole map, few codes."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from . import autoencoders, encoders, tokenizers
from .image_pipelines import PROMPT, Built

WIDTH = 32
SCALES = {"prior_guidance_scale": 3.0, "decoder_guidance_scale": 3.0, "prior_num_inference_steps": 2}


def _texts(encoder: Any, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}tokenizer": tokenizers.clip(), f"{prefix}text_encoder": encoder}


def _paella() -> Any:
    from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel

    return PaellaVQModel(bottleneck_blocks=1, num_vq_embeddings=8, embed_dim=16)


def _embeddings(channels: int) -> dict[str, Any]:
    """What the prior would say."""
    noise = torch.randn(1, channels, 4, 4, generator=torch.Generator().manual_seed(3))
    return {"image_embeddings": noise, "prompt": PROMPT, "guidance_scale": 3.0, "output_type": "latent"}


def _wuerstchen_prior() -> Any:
    """It divides by one minus half of what it computes, which is not to come near one."""
    from diffusers.pipelines.deprecated.wuerstchen import WuerstchenPrior

    prior = WuerstchenPrior(c_in=4, c=WIDTH, depth=2, c_cond=WIDTH, c_r=WIDTH, nhead=4, dropout=0.0)
    with torch.no_grad():
        prior.out[1].weight.mul_(0.1)
    return prior


def _wuerstchen_decoder() -> Any:
    from diffusers.pipelines.deprecated.wuerstchen import WuerstchenDiffNeXt

    return WuerstchenDiffNeXt(
        c_cond=WIDTH,
        c_r=16,
        c_hidden=[16, 32],
        nhead=[-1, 4],
        blocks=[1, 1],
        level_config=["CT", "CTA"],
        inject_effnet=[False, True],
        effnet_embd=4,
        clip_embd=WIDTH,
        dropout=0.0,
    )


def _scheduler() -> Any:
    return diffusers.DDPMWuerstchenScheduler()


def wuerstchen_prior() -> Built:
    pipe = diffusers.WuerstchenPriorPipeline(
        **_texts(encoders.clip_text()), prior=_wuerstchen_prior(), scheduler=_scheduler(), resolution_multiple=8.0
    )
    return pipe, {"prompt": PROMPT, "height": 64, "width": 64, "guidance_scale": 3.0, "output_type": "pt"}


def wuerstchen_decoder() -> Built:
    pipe = diffusers.WuerstchenDecoderPipeline(
        **_texts(encoders.clip_text()),
        decoder=_wuerstchen_decoder(),
        scheduler=_scheduler(),
        vqgan=_paella(),
        latent_dim_scale=4.0,
    )
    return pipe, _embeddings(4)


def wuerstchen() -> Built:
    """Its images are 43 times as large as what the prior says: three places a side are 128 pixels."""
    pipe = diffusers.WuerstchenCombinedPipeline(
        **_texts(encoders.clip_text()),
        **_texts(encoders.clip_text(), "prior_"),
        decoder=_wuerstchen_decoder(),
        scheduler=_scheduler(),
        vqgan=_paella(),
        prior_prior=_wuerstchen_prior(),
        prior_scheduler=_scheduler(),
    )
    return pipe, {"prompt": PROMPT, "height": 128, "width": 128, "output_type": "latent", **SCALES}


def _cascade_unet(heads: tuple[int, int], **options: Any) -> Any:
    from diffusers.models.unets import StableCascadeUNet

    return StableCascadeUNet(
        timestep_ratio_embedding_dim=16,
        conditioning_dim=WIDTH,
        block_out_channels=(16, 32),
        num_attention_heads=heads,
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        clip_text_pooled_in_channels=WIDTH,
        dropout=(0.0, 0.0),
        **options,
    )


def _cascade_prior() -> Any:
    return _cascade_unet(
        (2, 4),
        in_channels=4,
        out_channels=4,
        switch_level=(False,),
        clip_text_in_channels=WIDTH,
        clip_image_in_channels=WIDTH,
    )


def _cascade_decoder() -> Any:
    blocks = ("SDCascadeResBlock", "SDCascadeTimestepBlock")
    return _cascade_unet(
        (-1, 4),
        in_channels=4,
        out_channels=4,
        patch_size=2,
        block_types_per_layer=(blocks, (*blocks, "SDCascadeAttnBlock")),
        effnet_in_channels=4,
    )


def _decoder_parts() -> dict[str, Any]:
    parts = {"decoder": _cascade_decoder(), "scheduler": _scheduler(), "vqgan": _paella()}
    return parts | _texts(encoders.clip_text_projected())


def cascade_prior() -> Built:
    pipe = diffusers.StableCascadePriorPipeline(
        **_texts(encoders.clip_text_projected()),
        prior=_cascade_prior(),
        scheduler=_scheduler(),
        resolution_multiple=8.0,
    )
    return pipe, {"prompt": PROMPT, "height": 64, "width": 64, "guidance_scale": 3.0, "output_type": "pt"}


def cascade_decoder() -> Built:
    return diffusers.StableCascadeDecoderPipeline(**_decoder_parts(), latent_dim_scale=4.0), _embeddings(4)


def cascade() -> Built:
    pipe = diffusers.StableCascadeCombinedPipeline(
        **_decoder_parts(),
        **_texts(encoders.clip_text_projected(), "prior_"),
        prior_prior=_cascade_prior(),
        prior_scheduler=_scheduler(),
    )
    return pipe, {"prompt": PROMPT, "height": 128, "width": 128, "output_type": "latent", **SCALES}


def amused() -> Built:
    """The latent is of whole numbers, each of a code or of the mask; which it is drawn from a distribution."""
    transformer = diffusers.UVit2DModel(
        hidden_size=32,
        cond_embed_dim=32,
        micro_cond_encode_dim=2,
        micro_cond_embed_dim=10,
        encoder_hidden_size=32,
        vocab_size=32,
        codebook_size=12,
        in_channels=32,
        block_out_channels=32,
        num_res_blocks=1,
        downsample=True,
        upsample=True,
        block_num_heads=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    pipe = diffusers.AmusedPipeline(
        vqvae=autoencoders.vq(latent_channels=4),
        tokenizer=tokenizers.clip(),
        text_encoder=encoders.clip_text_projected(),
        transformer=transformer,
        scheduler=diffusers.AmusedScheduler(mask_token_id=31),
    )
    return pipe, {"prompt": PROMPT, "height": 64, "width": 64}
