"""Video pipelines in small whose denoisers are UNets with temporal layers."""

from __future__ import annotations

import diffusers

from . import autoencoders, encoders, sample_images, tokenizers
from .image_pipelines import PROMPT, SIZE, Built


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
    return pipe, {"image": sample_images.scene(), "num_frames": 3, "decode_chunk_size": 2, **SIZE, **guidance}


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
