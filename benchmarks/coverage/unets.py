"""Tiny configurations of the rarer UNets of diffusers, and calls of any size for them."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import nn

from tests.exact.denoisers import KINDS, TOKENS, WIDTH, Kind, noise

_LEVELS = (16, 32)
_VOCABULARY = 16


def _audio() -> nn.Module:
    return diffusers.AudioLDM2UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=_LEVELS,
        layers_per_block=1,
        cross_attention_dim=((WIDTH,), (WIDTH,)),
        attention_head_dim=4,
        norm_num_groups=8,
    )


def _audio_call(height: int, width: int) -> dict[str, Any]:
    return {"sample": noise(2, 4, height, width), "timestep": 501, "encoder_hidden_states": noise(2, TOKENS, WIDTH)}


def _dreamlite() -> nn.Module:
    return diffusers.DreamLiteUNetModel(
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    )


def _kandinsky() -> nn.Module:
    return diffusers.Kandinsky3UNet(
        time_embedding_dim=32,
        groups=4,
        attention_head_dim=8,
        layers_per_block=2,
        block_out_channels=(32, 32, 32),
        cross_attention_dim=WIDTH,
        encoder_hid_dim=24,
    )


def _kandinsky_call(height: int, width: int) -> dict[str, Any]:
    return {
        "sample": noise(2, 4, height, width),
        "timestep": torch.tensor([501, 501]),
        "encoder_hidden_states": noise(2, TOKENS, 24),
        "encoder_attention_mask": torch.ones(2, TOKENS),
    }


def _cascade() -> nn.Module:
    return diffusers.StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=WIDTH,
        block_out_channels=(16, 16),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 2),
        up_num_layers_per_block=(2, 1),
        clip_text_pooled_in_channels=24,
    )


def _cascade_call(height: int, width: int) -> dict[str, Any]:
    return {
        "sample": noise(2, 4, height, width),
        "timestep_ratio": torch.tensor([0.7, 0.3]),
        "clip_text_pooled": noise(2, 1, 24),
    }


def _one_dim() -> nn.Module:
    return diffusers.UNet1DModel(
        sample_size=64,
        in_channels=4,
        out_channels=4,
        extra_in_channels=16,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"),
        time_embedding_dim=16,
    )


def _one_dim_call(height: int, width: int) -> dict[str, Any]:
    return {"sample": noise(2, 4, 8 * (height + width)), "timestep": 501}


def _with_control() -> nn.Module:
    return diffusers.UNetControlNetXSModel(
        sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=_LEVELS,
        norm_num_groups=8,
        cross_attention_dim=WIDTH,
        num_attention_heads=4,
        ctrl_conditioning_embedding_out_channels=(8, 8),
        ctrl_block_out_channels=(8, 16),
        ctrl_num_attention_heads=2,
        ctrl_max_norm_num_groups=4,
    )


def _with_control_call(height: int, width: int) -> dict[str, Any]:
    return _audio_call(height, width) | {"controlnet_cond": noise(2, 3, 2 * height, 2 * width)}


def _uvit() -> nn.Module:
    return diffusers.UVit2DModel(
        hidden_size=32,
        cond_embed_dim=16,
        micro_cond_encode_dim=8,
        micro_cond_embed_dim=40,
        encoder_hidden_size=WIDTH,
        vocab_size=_VOCABULARY + 1,
        codebook_size=_VOCABULARY,
        in_channels=16,
        block_out_channels=16,
        num_res_blocks=1,
        block_num_heads=4,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )


def _uvit_call(height: int, width: int) -> dict[str, Any]:
    positions = torch.arange(2 * height * width)
    return {
        "input_ids": (7 * positions % _VOCABULARY).view(2, height, width),
        "encoder_hidden_states": noise(2, TOKENS, WIDTH),
        "pooled_text_emb": noise(2, 16),
        "micro_conds": torch.tensor([[64.0, 64, 0, 0, 6]] * 2),
    }


UNETS: dict[str, Kind] = {
    "AudioLDM2UNet2DConditionModel": Kind(build=_audio, arguments=_audio_call, odd=True),
    "DreamLiteUNetModel": Kind(build=_dreamlite, arguments=_audio_call, odd=True),
    "I2VGenXLUNet": KINDS["i2vgen"],
    "Kandinsky3UNet": Kind(build=_kandinsky, arguments=_kandinsky_call, odd=False),
    "StableCascadeUNet": Kind(build=_cascade, arguments=_cascade_call, odd=False),
    "UNet1DModel": Kind(build=_one_dim, arguments=_one_dim_call, odd=False),
    "UNetControlNetXSModel": Kind(build=_with_control, arguments=_with_control_call, odd=False),
    "UVit2DModel": Kind(build=_uvit, arguments=_uvit_call, odd=False),
}
"""Class -> how to build and call it; the commoner ones are in `tests.exact.denoisers`."""
