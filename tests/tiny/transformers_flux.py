"""FLUX and its relatives: text and image in two streams first, then in one; positions are given as ids."""

from __future__ import annotations

from typing import Any

import torch

from .transformers_entry import BATCH, IMAGE, IMAGE_TEXT, Tiny, flow_time, noise, positions

_STREAMS = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 3,
    "joint_attention_dim": 32,
}


def _ids(variant: int, axes: int = 3) -> dict[str, Any]:
    text = torch.zeros(IMAGE_TEXT[variant], axes)
    return {"img_ids": positions(*IMAGE[variant], axes=axes), "txt_ids": text}


def _streams(variant: int) -> dict[str, Any]:
    rows, columns = IMAGE[variant]
    return {
        "hidden_states": noise(BATCH, rows * columns, 16),
        "encoder_hidden_states": noise(BATCH, IMAGE_TEXT[variant], 32),
        "timestep": flow_time(),
        **_ids(variant),
    }


def _flux(variant: int) -> dict[str, Any]:
    return _streams(variant) | {"pooled_projections": noise(BATCH, 32), "guidance": torch.tensor([3.5, 2.0])}


def _flux2(variant: int) -> dict[str, Any]:
    ids = _ids(variant, axes=4)
    ids["txt_ids"][:, 3] = torch.arange(IMAGE_TEXT[variant])
    return _streams(variant) | ids | {"guidance": torch.tensor([3.5, 2.0])}


ENTRIES = (
    Tiny(
        name="FluxTransformer2DModel",
        family="flux",
        config=_STREAMS | {"pooled_projection_dim": 32, "guidance_embeds": True, "axes_dims_rope": (4, 4, 4)},
        call=_flux,
    ),
    Tiny(
        name="Flux2Transformer2DModel",
        family="flux2",
        config=_STREAMS | {"axes_dims_rope": (2, 2, 4, 4), "timestep_guidance_channels": 32},
        call=_flux2,
    ),
)
