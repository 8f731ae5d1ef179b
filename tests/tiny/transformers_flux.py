"""FLUX and its relatives: text and image in two streams first, then in one; positions are given as ids."""

from __future__ import annotations

from typing import Any

import torch

from .transformers_entry import BATCH, IMAGE, IMAGE_TEXT, Tiny, flow_time, noise, positions, ragged, step_time

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
    return _flux3(variant) | {"guidance": torch.tensor([3.5, 2.0])}


def _flux3(variant: int) -> dict[str, Any]:
    ids = _ids(variant, axes=4)
    ids["txt_ids"][:, 3] = torch.arange(IMAGE_TEXT[variant])
    return _streams(variant) | ids


def _bria(variant: int) -> dict[str, Any]:
    return _streams(variant) | {"timestep": step_time()}


def _fibo(variant: int) -> dict[str, Any]:
    """Each of the five blocks has a layer of the text encoder of its own."""
    layers = [noise(BATCH, IMAGE_TEXT[variant], 24, seed=block) for block in range(5)]
    return _bria(variant) | {"text_encoder_layers": layers}


def _fibo2(variant: int) -> dict[str, Any]:
    """Text is squeezed into 12 or 24 tokens, and read again by two of the layers."""
    text = (6, 20)[variant]
    rows, columns = IMAGE[variant]
    return {
        "hidden_states": noise(BATCH, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": noise(BATCH, 3, text, 32),
        "timestep": flow_time(),
    }


def _chroma(variant: int) -> dict[str, Any]:
    """Its mask is added to the scores, one for tokens that count."""
    rows, columns = IMAGE[variant]
    mask = torch.cat([ragged(IMAGE_TEXT[variant]), torch.ones(BATCH, rows * columns)], dim=1)
    return _streams(variant) | {"attention_mask": mask}


_CHROMA = {"approximator_num_channels": 16, "approximator_hidden_dim": 16, "approximator_layers": 2}
_FIBO2 = {
    "in_channels": 4,
    "dim": 36,
    "n_layers": 4,
    "n_heads": 3,
    "cap_feat_dim": 32,
    "injection_layer_ids": (1, 3),
    "min_num_gist_tokens": 12,
    "max_num_gist_tokens": 24,
    "gist_step": 12,
    "gist_min_text_len": 8,
    "gist_max_text_len": 20,
    "axes_dims": (4, 4, 4),
    "axes_lens": (64, 32, 32),
}
_ROPE3 = {"axes_dims_rope": (4, 4, 4)}
_ROPE4 = {"axes_dims_rope": (2, 2, 4, 4)}

ENTRIES = (
    Tiny(
        name="FluxTransformer2DModel",
        family="flux",
        config=_STREAMS | _ROPE3 | {"pooled_projection_dim": 32, "guidance_embeds": True},
        call=_flux,
    ),
    Tiny(
        name="Flux2Transformer2DModel",
        family="flux2",
        config=_STREAMS | _ROPE4 | {"timestep_guidance_channels": 32},
        call=_flux2,
    ),
    Tiny(
        name="Flux3Transformer2DModel",
        family="flux3",
        config=_STREAMS | _ROPE4 | {"timestep_channels": 32, "cond_in_channels": 16},
        call=_flux3,
    ),
    Tiny(name="BriaTransformer2DModel", family="bria", config=_STREAMS | _ROPE3, call=_bria),
    Tiny(
        name="BriaFiboTransformer2DModel",
        family="bria",
        config=_STREAMS | _ROPE3 | {"text_encoder_dim": 24},
        call=_fibo,
    ),
    Tiny(name="BriaFibo2Transformer2DModel", family="bria", config=_FIBO2, call=_fibo2, layout="BCHW"),
    Tiny(name="ChromaTransformer2DModel", family="chroma", config=_STREAMS | _ROPE3 | _CHROMA, call=_chroma),
    Tiny(name="LongCatImageTransformer2DModel", family="longcat", config=_STREAMS | _ROPE3, call=_streams),
    Tiny(
        name="OvisImageTransformer2DModel",
        family="ovis",
        config=_STREAMS | _ROPE3 | {"out_channels": 16},
        call=_streams,
    ),
)
