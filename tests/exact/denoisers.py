"""Tiny denoisers of every kind made of convolutions, norms and attention, and calls of any size for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.tiny.copies import Copies
from tests.tiny.weights import enliven, seeded

FRAMES, TOKENS, WIDTH = 3, 7, 32
_CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (16, 32, 32),
    "layers_per_block": 1,
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
_PLAIN = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (16, 32, 32),
    "layers_per_block": 1,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
}
Call = Callable[[int, int], dict[str, Any]]
COPIES = Copies()
"""Of the denoisers that this process has built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How to build a denoiser and what to call it with; `odd`: it takes sizes that are no multiple of its stride."""

    build: Callable[[], nn.Module]
    arguments: Call
    odd: bool


def build(name: str) -> nn.Module:
    """The same weights every time, CPU, fp32."""
    return COPIES.of(name, lambda: _built(name))


def _built(name: str) -> nn.Module:
    with seeded():
        return enliven(KINDS[name].build().eval().requires_grad_(False))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def call(name: str, height: int, width: int) -> dict[str, Any]:
    """Arguments for a latent of that size, the same on every rank."""
    return KINDS[name].arguments(height, width)


def _sd(**changes: Any) -> Callable[[], nn.Module]:
    return lambda: diffusers.UNet2DConditionModel(sample_size=16, **(_CROSS | changes))


def _text(height: int, width: int) -> dict[str, Any]:
    return {"sample": noise(2, 4, height, width), "timestep": 501, "encoder_hidden_states": noise(2, TOKENS, WIDTH)}


def _text_time(height: int, width: int) -> dict[str, Any]:
    added = {"text_embeds": noise(2, 32), "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2)}
    return _text(height, width) | {"added_cond_kwargs": added}


def _sdxl() -> nn.Module:
    return _sd(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
    )()


def _with_controlnet(height: int, width: int) -> dict[str, Any]:
    """Residuals as a ControlNet gives them: one per skip connection of the SD kind, and one for the middle."""
    levels = [(16, 1), (16, 1), (16, 2), (32, 2), (32, 4), (32, 4)]
    sizes = [(channels, -(-height // stride), -(-width // stride)) for channels, stride in levels]
    residuals = tuple(0.3 * noise(2, *size) for size in sizes)
    middle = {"mid_block_additional_residual": 0.3 * noise(2, *sizes[-1])}
    return _text(height, width) | {"down_block_additional_residuals": residuals} | middle


FREEU = {"s1": 0.9, "s2": 0.2, "b1": 1.5, "b2": 1.6}


def _freeu(build: Callable[[], Any]) -> Callable[[], nn.Module]:
    """The same with FreeU, which filters frequencies of the whole map."""

    def built() -> nn.Module:
        denoiser = build()
        denoiser.enable_freeu(**FREEU)
        return denoiser

    return built


def _svd() -> nn.Module:
    return diffusers.UNetSpatioTemporalConditionModel(
        sample_size=16,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        num_attention_heads=(4, 8),
        projection_class_embeddings_input_dim=3 * 32,
        addition_time_embed_dim=32,
    )


def _frames_first(height: int, width: int) -> dict[str, Any]:
    return {
        "sample": noise(1, FRAMES, 8, height, width),
        "timestep": 501,
        "encoder_hidden_states": noise(1, 1, WIDTH),
        "added_time_ids": torch.tensor([[6.0, 127, 0.02]]),
    }


def _motion() -> nn.Module:
    adapter = diffusers.MotionAdapter(
        block_out_channels=(16, 32, 32),
        motion_layers_per_block=1,
        motion_norm_num_groups=8,
        motion_num_attention_heads=4,
        use_motion_mid_block=True,
    )
    return diffusers.UNetMotionModel.from_unet2d(_sd()(), adapter)


def _video(height: int, width: int) -> dict[str, Any]:
    return {
        "sample": noise(1, 4, FRAMES, height, width),
        "timestep": 501,
        "encoder_hidden_states": noise(1, TOKENS, WIDTH),
    }


def _motion_call(height: int, width: int) -> dict[str, Any]:
    return _video(height, width) | {"encoder_hidden_states": noise(FRAMES, TOKENS, WIDTH)}


def _unet3d() -> nn.Module:
    return diffusers.UNet3DConditionModel(
        sample_size=16,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def _i2vgen() -> nn.Module:
    """What a frame shows is pooled to tokens of one number that every pixel sees."""
    return diffusers.I2VGenXLUNet(
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
    )


def _i2vgen_call(height: int, width: int) -> dict[str, Any]:
    shape = (1, 4, FRAMES, height, width)
    return {
        "sample": noise(*shape),
        "timestep": 501,
        "fps": torch.tensor([8]),
        "image_latents": noise(*shape).flip(-1),
        "image_embeddings": noise(1, WIDTH),
        "encoder_hidden_states": noise(1, TOKENS, WIDTH),
    }


def _unconditional(**changes: Any) -> Callable[[], nn.Module]:
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    }
    return lambda: diffusers.UNet2DModel(**(_PLAIN | blocks | changes))


def _no_text(height: int, width: int) -> dict[str, Any]:
    return {"sample": noise(2, 4, height, width), "timestep": 501}


def _added_keys() -> nn.Module:
    """As of DeepFloyd IF and Kandinsky 2.2: in one attention call an image sees itself and the text."""
    return diffusers.UNet2DConditionModel(
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        only_cross_attention=(False, False, True),
        mid_block_only_cross_attention=False,
        cross_attention_norm="group_norm",
        resnet_time_scale_shift="scale_shift",
        act_fn="gelu",
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    )


RESIZING_RESNETS = {
    "down_block_types": ("ResnetDownsampleBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "ResnetUpsampleBlock2D"),
}

KINDS: dict[str, Kind] = {
    "sd": Kind(build=_sd(), arguments=_text, odd=True),
    "sdxl": Kind(build=_sdxl, arguments=_text_time, odd=True),
    "controlnet": Kind(build=_sd(), arguments=_with_controlnet, odd=True),
    "scale_shift": Kind(build=_sd(resnet_time_scale_shift="scale_shift"), arguments=_text, odd=True),
    "freeu": Kind(build=_freeu(_sd()), arguments=_text, odd=True),
    "freeu_sdxl": Kind(build=_freeu(_sdxl), arguments=_text_time, odd=True),
    "freeu_video": Kind(build=_freeu(_motion), arguments=_motion_call, odd=True),
    "wide": Kind(build=_sd(conv_in_kernel=7, conv_out_kernel=5), arguments=_text, odd=True),
    "svd": Kind(build=_svd, arguments=_frames_first, odd=True),
    "motion": Kind(build=_motion, arguments=_motion_call, odd=True),
    "unet3d": Kind(build=_unet3d, arguments=_video, odd=True),
    "i2vgen": Kind(build=_i2vgen, arguments=_i2vgen_call, odd=False),
    "unconditional": Kind(build=_unconditional(), arguments=_no_text, odd=False),
    "asymmetric": Kind(build=_unconditional(downsample_padding=0), arguments=_no_text, odd=False),
    "added_keys": Kind(build=_added_keys, arguments=_text, odd=False),
    "resizing_resnets": Kind(build=_unconditional(**RESIZING_RESNETS), arguments=_no_text, odd=False),
}
