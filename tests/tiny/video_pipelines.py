"""Video pipelines in small: UNets with temporal layers, and transformers that are called once per guidance branch."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders, encoders, pictures, tokenizers
from .image_pipelines import PROMPT, SIZE, Built
from .transformer_pipelines import flow_matching


def svd() -> Built:
    """Its norms have 32 groups whatever the configuration says, so it is at least 32 channels wide.

    The published scheduler starts at sigma 700: in fp32 that alone costs 1e-5 of the result, so this one starts lower.
    """
    unet = diffusers.UNetSpatioTemporalConditionModel(
        sample_size=16,
        down_block_types=(
            "CrossAttnDownBlockSpatioTemporal",
            "CrossAttnDownBlockSpatioTemporal",
            "DownBlockSpatioTemporal",
        ),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        block_out_channels=(32, 32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        num_attention_heads=(4, 4, 8),
        projection_class_embeddings_input_dim=3 * 32,
        addition_time_embed_dim=32,
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        sigma_max=20.0,
        sigma_min=0.002,
        timestep_spacing="leading",
        timestep_type="continuous",
        use_karras_sigmas=True,
    )
    pipe = diffusers.StableVideoDiffusionPipeline(
        vae=autoencoders.temporal_decoder(),
        image_encoder=encoders.clip_vision(),
        unet=unet,
        scheduler=scheduler,
        feature_extractor=encoders.clip_image_processor(),
    )
    guidance = {"min_guidance_scale": 1.0, "max_guidance_scale": 2.5}
    return pipe, {"image": pictures.scene(), "num_frames": 3, "decode_chunk_size": 2, **SIZE, **guidance}


def animatediff() -> Built:
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    adapter = diffusers.MotionAdapter(
        block_out_channels=(16, 32, 32),
        motion_layers_per_block=1,
        motion_norm_num_groups=8,
        motion_num_attention_heads=4,
        use_motion_mid_block=False,
    )
    pipe = diffusers.AnimateDiffPipeline(
        vae=autoencoders.kl(),
        text_encoder=encoders.clip_text(),
        tokenizer=tokenizers.clip(),
        unet=unet,
        motion_adapter=adapter,
        scheduler=diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False),
    )
    return pipe, {"prompt": PROMPT, "num_frames": 3, **SIZE}


def text_to_video() -> Built:
    unet = diffusers.UNet3DConditionModel(
        sample_size=16,
        down_block_types=("CrossAttnDownBlock3D", "CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D", "CrossAttnUpBlock3D"),
        block_out_channels=(32, 32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    pipe = diffusers.TextToVideoSDPipeline(
        vae=autoencoders.kl(),
        text_encoder=encoders.clip_text(),
        tokenizer=tokenizers.clip(),
        unet=unet,
        scheduler=diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False),
    )
    return pipe, {"prompt": PROMPT, "num_frames": 3, **SIZE}


def _wan_transformer() -> Any:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=64,
    )


def _wan(**more: Any) -> Built:
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    pipe = diffusers.WanPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=encoders.umt5(),
        vae=autoencoders.wan(),
        scheduler=scheduler,
        transformer=_wan_transformer(),
        **more,
    )
    return pipe, {"prompt": PROMPT, "height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 32}


def wan() -> Built:
    return _wan()


def wan_two() -> Built:
    """Two denoisers: the second takes over below nine tenths of the schedule."""
    return _wan(transformer_2=_wan_transformer(), boundary_ratio=0.9)


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
    call = {"prompt": PROMPT, "height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 32}
    return pipe, call | {"prompt_template": template} | guidance
