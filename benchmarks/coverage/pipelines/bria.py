"""Pipelines of Bria: FLUX's blocks with texts of their own."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.tiny import autoencoders, encoders, language_encoders, sample_images, tokenizers
from tests.tiny.image_pipelines import PROMPT, SIZE
from tests.tiny.transformer_pipelines import flow_matching

from .entry import Built, Entry

_STREAMS = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
}
_NEGATIVE = {"negative_prompt": "blurred"}
_FIBO_CALL = {"prompt": '{"short_description": "a red house"}', "max_sequence_length": 64, **_NEGATIVE, **SIZE}
_EDITS = tuple(f'{{"edit_instruction": "paint it {colour}"}}' for colour in ("blue", "in the red of old bricks"))


def _bria() -> Built:
    pipe = diffusers.BriaPipeline(
        transformer=diffusers.BriaTransformer2DModel(in_channels=16, joint_attention_dim=32, **_STREAMS),
        scheduler=flow_matching(use_dynamic_shifting=True),
        vae=autoencoders.kl(quant_conv=False, scaling_factor=0.36),
        text_encoder=encoders.t5(),
        tokenizer=tokenizers.t5(),
    )
    return pipe, {"prompt": PROMPT, "max_sequence_length": 32, **_NEGATIVE, **SIZE}


def _fibo_parts() -> dict[str, Any]:
    """Every block has a layer of the text encoder of its own."""
    return {
        "transformer": diffusers.BriaFiboTransformer2DModel(
            in_channels=16, joint_attention_dim=64, text_encoder_dim=32, **_STREAMS
        ),
        "scheduler": flow_matching(use_dynamic_shifting=True),
        "vae": autoencoders.wan(),
        "text_encoder": language_encoders.smollm3(),
        "tokenizer": tokenizers.qwen(),
    }


def _fibo() -> Built:
    return diffusers.BriaFiboPipeline(**_fibo_parts()), dict(_FIBO_CALL)


def _fibo_edit() -> Built:
    call = _FIBO_CALL | {"prompt": _EDITS[0], "image": sample_images.scene(), "_auto_resize": False}
    return diffusers.BriaFiboEditPipeline(**_fibo_parts()), call


def _fibo2() -> Built:
    """Text is squeezed into 12 or 24 tokens, and read again by two of the layers."""
    transformer = diffusers.BriaFibo2Transformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=4,
        n_heads=2,
        cap_feat_dim=32,
        injection_layer_ids=(1, 3),
        min_num_gist_tokens=12,
        max_num_gist_tokens=24,
        gist_step=12,
        gist_min_text_len=8,
        gist_max_text_len=20,
        axes_dims=(4, 6, 6),
        axes_lens=(512, 64, 64),
    )
    pipe = diffusers.BriaFibo2Pipeline(
        transformer=transformer,
        scheduler=flow_matching(use_dynamic_shifting=True),
        vae=autoencoders.flux2(),
        text_encoder=language_encoders.qwen3_vl(layers=3),
        processor=encoders.ImageReader(tokenizers.qwen()),
    )
    pipe.text_encoder_out_layers = ((1,), (2,), (3,))
    return pipe, {"prompt": PROMPT, **_NEGATIVE, **SIZE}


ENTRIES = (
    Entry(name="BriaPipeline", build=_bria),
    Entry(name="BriaFiboPipeline", build=_fibo),
    Entry(name="BriaFiboEditPipeline", build=_fibo_edit, second=_EDITS[1]),
    Entry(name="BriaFibo2Pipeline", build=_fibo2, guidance="a call each"),
)
