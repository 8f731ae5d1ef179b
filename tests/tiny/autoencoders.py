"""Tiny autoencoders with the compression of the real ones: 8 in space, 4 in time for the causal video ones."""

from __future__ import annotations

from typing import Any

import diffusers


def kl(*, scaling_factor: float = 0.18215, latent_channels: int = 4, quant_conv: bool = True, levels: int = 4) -> Any:
    """Divides each side by 2 ** (levels - 1); with other than four levels it is narrow, for large images."""
    return diffusers.AutoencoderKL(
        latent_channels=latent_channels,
        block_out_channels=(16, 16, 32, 32) if levels == 4 else (8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=128,
        use_quant_conv=quant_conv,
        use_post_quant_conv=quant_conv,
        shift_factor=None if quant_conv else 0.1,
        scaling_factor=scaling_factor,
    )


def temporal_decoder() -> Any:
    """Its group norms have 32 groups whatever the configuration says, so it is at least 32 channels wide."""
    return diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        latent_channels=4,
        layers_per_block=1,
    )


def wan(*, levels: int = 4, width: int = 4, blocks: int = 1, latent_channels: int = 16) -> Any:
    """Divides each side by 2 ** (levels - 1). The default statistics are of 16 latent channels."""
    statistics = {"latents_mean": [0.0] * latent_channels, "latents_std": [1.0] * latent_channels}
    return diffusers.AutoencoderKLWan(
        base_dim=width,
        z_dim=latent_channels,
        dim_mult=[1] * levels,
        num_res_blocks=blocks,
        temperal_downsample=[False] * (levels - 3) + [True, True],
        scale_factor_spatial=2 ** (levels - 1),
        **statistics if latent_channels != 16 else {},
    )


def qwen21() -> Any:
    """Divides each side by 16; its images have an alpha channel."""
    return diffusers.AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )


def qwen(*, levels: int = 4, width: int = 4, blocks: int = 1, latent_channels: int = 4, channels: int = 3) -> Any:
    """Divides each side by 2 ** (levels - 1)."""
    return diffusers.AutoencoderKLQwenImage(
        base_dim=width,
        z_dim=latent_channels,
        input_channels=channels,
        dim_mult=[1] * levels,
        num_res_blocks=blocks,
        temperal_downsample=[False] + [True] * (levels - 2),
        latents_mean=[0.0] * latent_channels,
        latents_std=[1.0] * latent_channels,
    )


def flux2() -> Any:
    return diffusers.AutoencoderKLFlux2(
        latent_channels=4,
        block_out_channels=(16, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=128,
    )


def cogvideox() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )


def allegro() -> Any:
    return diffusers.AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 4,
        up_block_types=("AllegroUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )


def ltx() -> Any:
    """Three levels that halve space and time: 8 in both."""
    scaling = (True, True, True, False)
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=scaling,
        decoder_spatio_temporal_scaling=scaling,
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
    )


def ltx2() -> Any:
    """Divides rows and columns by 4 and time by 4."""
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1,) * 3,
        decoder_layers_per_block=(1,) * 3,
        spatio_temporal_scaling=(True,) * 2,
        decoder_spatio_temporal_scaling=(True,) * 2,
        decoder_inject_noise=(False,) * 3,
        downsample_type=("spatiotemporal",) * 2,
        upsample_type=("spatiotemporal",) * 2,
        upsample_residual=(False,) * 2,
        upsample_factor=(1,) * 2,
        patch_size=1,
        decoder_causal=False,
    )


def hunyuan() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )


def vq(*, latent_channels: int, norm_type: str = "group") -> Any:
    """Divides each side by 8; with `norm_type` "spatial" the decoder's norms look at the latent (MoVQ).

    Those have 32 groups whatever the configuration says, so it is at least 32 channels wide.
    """
    return diffusers.VQModel(
        in_channels=3,
        out_channels=3,
        latent_channels=latent_channels,
        block_out_channels=(32, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=8,
        norm_type=norm_type,
        num_vq_embeddings=12,
        vq_embed_dim=latent_channels,
    )
