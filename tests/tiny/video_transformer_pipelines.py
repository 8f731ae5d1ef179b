"""Video pipelines in small whose denoisers are transformers."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders, encoders, sample_images, tokenizers
from .image_pipelines import PROMPT, Built
from .transformer_pipelines import flow_matching

VIDEO = {"prompt": PROMPT, "height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 32}


def wan_transformer(**more: Any) -> Any:
    options = {"in_channels": 16, "out_channels": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64, **more}
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=12,
        num_layers=2,
        rope_max_seq_len=64,
        **options,
    )


def _wan_scheduler() -> Any:
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )


def wan_parts() -> dict[str, Any]:
    """All but the transformer."""
    return {
        "tokenizer": tokenizers.t5(),
        "text_encoder": encoders.umt5(),
        "vae": autoencoders.wan(),
        "scheduler": _wan_scheduler(),
    }


def _wan(**more: Any) -> Built:
    return diffusers.WanPipeline(**wan_parts(), transformer=wan_transformer(), **more), dict(VIDEO)


def wan() -> Built:
    return _wan()


def wan_two() -> Built:
    """Two denoisers: the second takes over below nine tenths of the schedule."""
    return _wan(transformer_2=wan_transformer(), boundary_ratio=0.9)


def _wan_i2v(transformer: Any, **more: Any) -> Built:
    """The image comes as further channels of the sample."""
    pipe = diffusers.WanImageToVideoPipeline(**wan_parts(), transformer=transformer, **more)
    return pipe, VIDEO | {"image": sample_images.scene(64, 64)}


def wan_i2v() -> Built:
    """Wan 2.1: the image is seen by an encoder as well, whose tokens come beside those of the text."""
    transformer = wan_transformer(in_channels=36, image_dim=32, added_kv_proj_dim=48)
    sight = encoders.clip_image_reader()
    return _wan_i2v(transformer, **sight)


def wan_i2v_two() -> Built:
    """Wan 2.2: two denoisers, of which the second takes over below nine tenths of the schedule."""
    second = {"transformer_2": wan_transformer(in_channels=36), "boundary_ratio": 0.9}
    return _wan_i2v(wan_transformer(in_channels=36), **second)


def hunyuan_video() -> Built:
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=32,
        pooled_projection_dim=32,
        rope_axes_dim=(4, 6, 6),
    )
    pipe = diffusers.HunyuanVideoPipeline(
        text_encoder=encoders.llama(),
        tokenizer=tokenizers.llama(),
        transformer=transformer,
        vae=autoencoders.hunyuan(),
        scheduler=flow_matching(shift=7.0),
        text_encoder_2=encoders.clip_text(),
        tokenizer_2=tokenizers.clip(),
    )
    template = {"template": "{}", "crop_start": 0}
    guidance = {"negative_prompt": "blurred", "true_cfg_scale": 3.0}
    return pipe, VIDEO | {"prompt_template": template} | guidance


def _cogvideox_parts(in_channels: int = 4) -> dict[str, Any]:
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=32,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=32,
        use_rotary_positional_embeddings=True,
    )
    return {
        "tokenizer": tokenizers.t5(),
        "text_encoder": encoders.t5(),
        "vae": autoencoders.cogvideox(),
        "transformer": transformer,
        "scheduler": diffusers.CogVideoXDDIMScheduler(),
    }


def cogvideox() -> Built:
    return diffusers.CogVideoXPipeline(**_cogvideox_parts()), dict(VIDEO)


def cogvideox_image() -> Built:
    """The image comes as further channels of the sample."""
    pipe = diffusers.CogVideoXImageToVideoPipeline(**_cogvideox_parts(in_channels=8))
    return pipe, VIDEO | {"image": sample_images.scene(64, 64)}


def allegro() -> Built:
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=24,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        caption_channels=32,
    )
    vae = autoencoders.allegro()
    vae.enable_tiling()  # it decodes no other way
    pipe = diffusers.AllegroPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=encoders.t5(),
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.DDIMScheduler(),
    )
    return pipe, VIDEO | {"num_frames": 8, "clean_caption": False}


def ltx_parts() -> dict[str, Any]:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    )
    return {
        "scheduler": flow_matching(use_dynamic_shifting=True),
        "vae": autoencoders.ltx(),
        "text_encoder": encoders.t5(),
        "tokenizer": tokenizers.t5(),
        "transformer": transformer,
    }


def ltx() -> Built:
    return diffusers.LTXPipeline(**ltx_parts()), dict(VIDEO)
