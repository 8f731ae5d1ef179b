"""A FLUX-type pipeline with random weights, of any size, in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

CALL = {
    **{"prompt": "a fox in the snow", "max_sequence_length": 16, "output_type": "latent"},
    **{"height": 64, "width": 64, "num_inference_steps": 2},
}


def save_model(folder: Path, *, heads: int, double: int, single: int, dtype: torch.dtype) -> None:
    """Save a pipeline whose transformer has so many heads of 64 and blocks, and whose T5 has a quarter of its width."""
    from diffusers import FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    from tests.tiny import build

    width = 64 * heads
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=double,
            num_single_layers=single,
            attention_head_dim=64,
            num_attention_heads=heads,
            joint_attention_dim=width // 4,
            pooled_projection_dim=32,
            axes_dims_rope=(16, 24, 24),
        )
        text = T5Config(vocab_size=1000, d_model=width // 4, d_kv=16, d_ff=width, num_layers=4, num_heads=width // 64)
        encoder = T5EncoderModel(text)
    pipe: Any = build("flux").pipe
    pipe = pipe.to(dtype)
    pipe.register_modules(transformer=_filled(transformer, dtype), text_encoder_2=_filled(encoder, dtype))
    pipe.save_pretrained(folder)
    os.sync()  # pages that are not on the disk yet would count as a process's own


def _filled(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    network = network.to_empty(device="cpu").to(dtype)
    with torch.no_grad():
        for x in network.parameters():
            x.normal_(std=0.02)
    return network.eval().requires_grad_(False)
