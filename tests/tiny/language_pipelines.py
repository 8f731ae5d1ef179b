"""Image transformers in small whose text is read by a language model."""

from __future__ import annotations

import copy
from typing import Any

import diffusers

from . import autoencoders, encoders, sample_images, tokenizers
from .image_pipelines import PROMPT, SIZE, Built
from .transformer_pipelines import flow_matching

TRUE_GUIDANCE = {"negative_prompt": "blurred", "true_cfg_scale": 4.0}


def _qwen_transformer() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    )


def _qwen_scheduler() -> Any:
    return flow_matching(use_dynamic_shifting=True, shift_terminal=0.02, base_shift=0.5, max_shift=0.9)


def qwen() -> Built:
    pipe = diffusers.QwenImagePipeline(
        scheduler=_qwen_scheduler(),
        vae=autoencoders.qwen(),
        text_encoder=encoders.qwen(),
        tokenizer=tokenizers.qwen(),
        transformer=_qwen_transformer(),
    )
    return pipe, {"prompt": PROMPT, "max_sequence_length": 256, **SIZE, **TRUE_GUIDANCE}


def qwen_edit() -> Built:
    """Scales its image to a megapixel, so that the autoencoder divides each side by 32: 256 tokens of it."""
    pipe = diffusers.QwenImageEditPipeline(
        scheduler=_qwen_scheduler(),
        vae=autoencoders.qwen(levels=6, width=2, blocks=0),
        text_encoder=encoders.qwen(),
        tokenizer=tokenizers.qwen(),
        processor=encoders.ImageReader(tokenizers.qwen()),
        transformer=_qwen_transformer(),
    )
    call = {"image": sample_images.scene(), "prompt": PROMPT, "height": 512, "width": 384}
    return pipe, call | TRUE_GUIDANCE


def zimage() -> Built:
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[8, 4, 4],
        axes_lens=[512, 64, 64],
    )
    pipe = diffusers.ZImagePipeline(
        scheduler=flow_matching(shift=3.0),
        vae=autoencoders.kl(latent_channels=16, quant_conv=False, scaling_factor=0.36),
        text_encoder=encoders.qwen3(),
        tokenizer=tokenizers.qwen(),
        transformer=transformer,
    )
    return pipe, {"prompt": PROMPT, "max_sequence_length": 64, "guidance_scale": 3.0, **SIZE}


def flux2() -> Built:
    """Distilled: the guidance scale is an input of the denoiser, which is called once in a step."""
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * 32,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=True,
    )
    pipe = diffusers.Flux2Pipeline(
        scheduler=flow_matching(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoders.flux2(),
        text_encoder=encoders.mistral(),
        tokenizer=tokenizers.mistral(),
        transformer=transformer,
    )
    return pipe, {"prompt": PROMPT, "max_sequence_length": 32, "text_encoder_out_layers": (1, 2, 3), **SIZE}


def lumina2() -> Built:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=16,
        in_channels=4,
        hidden_size=48,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=8,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(300, 64, 64),
        cap_feat_dim=32,
    )
    pipe = diffusers.Lumina2Pipeline(
        transformer=transformer,
        scheduler=flow_matching(shift=6.0),
        vae=autoencoders.kl(quant_conv=False, scaling_factor=0.36),
        text_encoder=encoders.gemma(),
        tokenizer=copy.deepcopy(tokenizers.llama()),  # the pipeline changes it
    )
    call = {"prompt": PROMPT, "negative_prompt": "blurred", "system_prompt": "Draw.", "max_sequence_length": 64}
    return pipe, call | SIZE


def cogview4() -> Built:
    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=32,
        time_embed_dim=32,
        condition_dim=8,
        sample_size=16,
    )
    pipe = diffusers.CogView4Pipeline(
        tokenizer=tokenizers.llama(),
        text_encoder=encoders.llama(),
        vae=autoencoders.kl(),
        transformer=transformer,
        scheduler=flow_matching(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"),
    )
    return pipe, {"prompt": PROMPT, "negative_prompt": "blurred", "max_sequence_length": 64, **SIZE}


def hidream() -> Built:
    """Experts in every block, and four readers of the text."""
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=12,
        num_attention_heads=3,
        caption_channels=[32, 32],
        text_emb_dim=64,
        axes_dims_rope=(4, 4, 4),
        max_resolution=(16, 16),
        llama_layers=[0, 1, 2, 3],
        force_inference_output=True,
    )
    pipe = diffusers.HiDreamImagePipeline(
        scheduler=flow_matching(shift=3.0),
        vae=autoencoders.kl(quant_conv=False, scaling_factor=0.36),
        text_encoder=encoders.clip_text_projected(),
        tokenizer=tokenizers.clip(),
        text_encoder_2=encoders.clip_text_projected(),
        tokenizer_2=tokenizers.clip(),
        text_encoder_3=encoders.t5(),
        tokenizer_3=tokenizers.t5(),
        text_encoder_4=encoders.llama(),
        tokenizer_4=copy.deepcopy(tokenizers.llama()),  # the pipeline changes it
        transformer=transformer,
    )
    pipe.default_sample_size = 16  # it scales every image to that many pixels
    return pipe, {"prompt": PROMPT, "max_sequence_length": 32, **SIZE}
