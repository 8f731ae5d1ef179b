"""Pipelines with denoisers of their own that diffusers no longer develops, and unconditional ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers

from tests.tiny import autoencoders, encoders, image_pipelines, pixel_pipelines, sample_images, tokenizers
from tests.tiny.image_pipelines import PROMPT, SIZE

from .entry import IMAGE, Built, Entry, changed, derived
from .unets_rarer import prior

_SIDE = pixel_pipelines.SIDE
_STEPS = {"decoder_num_inference_steps": 2, "super_res_num_inference_steps": 2, "decoder_guidance_scale": 2.0}


def _alt(name: str, call: dict[str, Any]) -> Callable[[], Built]:
    """Its text encoder is XLM-RoBERTa with a projection."""

    def build() -> Built:
        from diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series import (
            RobertaSeriesConfig,
            RobertaSeriesModelWithTransformation,
        )

        config = RobertaSeriesConfig(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=80,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            project_dim=32,
        )
        tokenizer = tokenizers.xlm_roberta()
        tokenizer.model_max_length = 77
        parts = {"text_encoder": RobertaSeriesModelWithTransformation(config), "tokenizer": tokenizer}
        return derived(image_pipelines.sd, name, call, **parts)

    return build


def _unclip_parts() -> dict[str, Any]:
    """A decoder that sees the embedding of an image, and two networks that enlarge what it draws.

    They predict samples: of noise the first step makes black and white, and rounding decides which.
    """
    from diffusers.pipelines.deprecated.unclip import UnCLIPTextProjModel

    decoder = diffusers.UNet2DConditionModel(
        sample_size=_SIDE,
        in_channels=3,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        class_embed_type="identity",
        resnet_time_scale_shift="scale_shift",
    )
    enlarging = {
        "sample_size": 2 * _SIDE,
        "layers_per_block": 1,
        "down_block_types": ("ResnetDownsampleBlock2D", "ResnetDownsampleBlock2D"),
        "up_block_types": ("ResnetUpsampleBlock2D", "ResnetUpsampleBlock2D"),
        "block_out_channels": (16, 32),
        "in_channels": 6,
        "out_channels": 3,
        "norm_num_groups": 8,
        "attention_head_dim": 8,
    }
    return {
        "decoder": decoder,
        "text_encoder": encoders.clip_text_projected(),
        "tokenizer": tokenizers.clip(),
        "text_proj": UnCLIPTextProjModel(clip_embeddings_dim=32, time_embed_dim=64, cross_attention_dim=32),
        "super_res_first": diffusers.UNet2DModel(**enlarging),
        "super_res_last": diffusers.UNet2DModel(**enlarging),
        "decoder_scheduler": diffusers.UnCLIPScheduler(variance_type="learned_range", prediction_type="sample"),
        "super_res_scheduler": diffusers.UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample"),
    }


def _unclip() -> Built:
    scheduler = diffusers.UnCLIPScheduler(
        variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0
    )
    pipe = diffusers.UnCLIPPipeline(**_unclip_parts(), prior=prior(), prior_scheduler=scheduler)
    return pipe, {"prompt": PROMPT, "prior_num_inference_steps": 2, "prior_guidance_scale": 2.0, **_STEPS}


def _unclip_variation() -> Built:
    parts = {"feature_extractor": encoders.clip_image_processor(), "image_encoder": encoders.clip_vision()}
    pipe = diffusers.UnCLIPImageVariationPipeline(**_unclip_parts(), **parts)
    return pipe, {"image": sample_images.scene(64, 64), **_STEPS}


def _versatile(name: str, call: dict[str, Any]) -> Callable[[], Built]:
    """A UNet for images, whose blocks may be joined with those of one for texts."""

    def build() -> Built:
        unet = image_pipelines.sd()[0].unet
        text_unet = _flat(unet)
        shared = {"image_feature_extractor": encoders.clip_image_processor(), "image_encoder": encoders.clip_vision()}
        shared |= {"image_unet": unet, "text_unet": text_unet, "text_encoder": encoders.clip_text_projected()}
        return derived(image_pipelines.sd, name, call, **_accepted(name, shared))

    return build


def _accepted(name: str, parts: dict[str, Any]) -> dict[str, Any]:
    import inspect

    return {key: value for key, value in parts.items() if key in inspect.signature(getattr(diffusers, name)).parameters}


def _flat(unet: Any) -> Any:
    """As the UNet for images, over a row of channels."""
    from diffusers.pipelines.deprecated.versatile_diffusion.modeling_text_unet import UNetFlatConditionModel

    return UNetFlatConditionModel(
        down_block_types=("CrossAttnDownBlockFlat", "CrossAttnDownBlockFlat", "DownBlockFlat"),
        up_block_types=("UpBlockFlat", "CrossAttnUpBlockFlat", "CrossAttnUpBlockFlat"),
        **{name: unet.config[name] for name in ("block_out_channels", "layers_per_block", "cross_attention_dim")},
        **{name: unet.config[name] for name in ("attention_head_dim", "norm_num_groups")},
    )


def _vq() -> Built:
    """Of 16 x 16 latent pixels each is one of twelve."""
    from diffusers.pipelines.deprecated.vq_diffusion.pipeline_vq_diffusion import (
        LearnedClassifierFreeSamplingEmbeddings,
    )

    transformer = diffusers.Transformer2DModel(
        attention_head_dim=8,
        num_attention_heads=4,
        num_layers=1,
        norm_num_groups=8,
        num_embeds_ada_norm=12,
        num_vector_embeds=13,
        sample_size=16,
        cross_attention_dim=32,
        activation_fn="geglu-approximate",
        attention_bias=True,
    )
    pipe = diffusers.VQDiffusionPipeline(
        vqvae=autoencoders.vq(latent_channels=3),
        text_encoder=encoders.clip_text(),
        tokenizer=tokenizers.clip(),
        transformer=transformer,
        scheduler=diffusers.VQDiffusionScheduler(num_vec_classes=13),
        learned_classifier_free_sampling_embeddings=LearnedClassifierFreeSamplingEmbeddings(learnable=False),
    )
    return pipe, {"prompt": PROMPT}


def _unidiffuser() -> Built:
    """A transformer of latents, of the embedding of an image, and of a text: each may be noise or given."""
    from diffusers.pipelines.deprecated.unidiffuser import UniDiffuserModel, UniDiffuserTextDecoder

    unet = UniDiffuserModel(
        text_dim=32,
        clip_img_dim=32,
        num_text_tokens=77,
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        activation_fn="gelu",
        num_embeds_ada_norm=1000,
        norm_type="unidiffuser",
        block_type="unidiffuser",
    )
    decoder = UniDiffuserTextDecoder(
        prefix_length=77, prefix_inner_dim=32, prefix_hidden_dim=32, vocab_size=514, n_embd=32, n_layer=1, n_head=4
    )
    parts = {
        "unet": unet,
        "text_decoder": decoder,
        "image_encoder": encoders.clip_vision(),
        "clip_image_processor": encoders.clip_image_processor(),
        "clip_tokenizer": tokenizers.clip(),
        "text_tokenizer": tokenizers.clip(),
    }
    return derived(image_pipelines.sd, "UniDiffuserPipeline", {}, **parts)


def _unconditional(name: str, scheduler: str, call: dict[str, Any], **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        unet = pixel_pipelines.ddpm()[0].unet
        return getattr(diffusers, name)(unet, getattr(diffusers, scheduler)(**options)), {"output_type": "np"} | call

    return build


def _latent() -> Built:
    unet = changed(pixel_pipelines.ddpm()[0].unet, in_channels=3)
    return diffusers.LDMPipeline(autoencoders.vq(latent_channels=3), unet, diffusers.DDIMScheduler()), {}


_PAINTED = {
    "image": sample_images.scene(_SIDE, _SIDE),
    "mask_image": sample_images.mask(_SIDE, _SIDE),
    "num_inference_steps": 4,
}
_WITH_PROMPT: dict[str, Callable[[], Built]] = {
    "AltDiffusionPipeline": _alt("AltDiffusionPipeline", {}),
    "AltDiffusionImg2ImgPipeline": _alt("AltDiffusionImg2ImgPipeline", IMAGE),
    "VersatileDiffusionTextToImagePipeline": _versatile("VersatileDiffusionTextToImagePipeline", {}),
}
_OF_ONE = {
    "VersatileDiffusionImageVariationPipeline": _versatile(
        "VersatileDiffusionImageVariationPipeline", {"prompt": None, "image": sample_images.scene(64, 64), **SIZE}
    ),
}
_UNCONDITIONAL = {
    "RePaintPipeline": _unconditional(
        "RePaintPipeline", "RePaintScheduler", _PAINTED | {"jump_length": 2, "jump_n_sample": 2}
    ),
    "PNDMPipeline": _unconditional("PNDMPipeline", "PNDMScheduler", {"num_inference_steps": 4}),
    "ScoreSdeVePipeline": _unconditional("ScoreSdeVePipeline", "ScoreSdeVeScheduler", {}, sigma_max=20.0),
    "KarrasVePipeline": _unconditional("KarrasVePipeline", "KarrasVeScheduler", {}),
    "LDMPipeline": _latent,
}

ENTRIES = (
    *(Entry(name=name, build=build, output_type="latent") for name, build in _WITH_PROMPT.items()),
    *(Entry(name=name, build=build, prompts="") for name, build in _OF_ONE.items()),
    *(
        Entry(name=name, build=build, output_type="np", guidance="none", prompts="")
        for name, build in _UNCONDITIONAL.items()
    ),
    Entry(name="UnCLIPPipeline", build=_unclip, output_type="pt"),
    Entry(name="UnCLIPImageVariationPipeline", build=_unclip_variation, output_type="pt", prompts=""),
    Entry(name="VQDiffusionPipeline", build=_vq, output_type="np", prompts=""),
    Entry(name="UniDiffuserPipeline", build=_unidiffuser),
)
