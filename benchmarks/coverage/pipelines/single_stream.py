"""Pipelines of transformers in which text and image are one sequence, and of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from tests.tiny import autoencoders, encoders, language_encoders, tokenizers
from tests.tiny.image_pipelines import PROMPT, SIZE
from tests.tiny.transformer_pipelines import flow_matching
from tests.tiny.transformers import TRANSFORMERS

from .entry import Built, Entry, Guidance

_CALL: dict[str, Any] = {"prompt": PROMPT, "negative_prompt": "blurred", **SIZE}


def transformer(name: str, **changes: Any) -> Any:
    """As in the tests of denoisers, two blocks deep unless `changes` say otherwise."""
    tiny = TRANSFORMERS[name]
    depth = {part: 2 for part in ("num_layers", "depth", "num_single_layers") if part in tiny.config}
    model = getattr(diffusers, name)(**tiny.config | depth | changes)
    for parameter, value in model.named_parameters():
        if tiny.empty and parameter.endswith(tiny.empty):
            torch.nn.init.zeros_(value)  # the class leaves them as they are
    return model


def _ernie() -> Built:
    """Its prediction has the channels of 2 x 2 patches of the latent."""
    pipe = diffusers.ErnieImagePipeline(
        transformer=transformer("ErnieImageTransformer2DModel", in_channels=16, out_channels=16, patch_size=1),
        vae=autoencoders.flux2(),
        text_encoder=encoders.mistral().model.language_model,
        tokenizer=tokenizers.mistral(),
        scheduler=flow_matching(),
    )
    return pipe, dict(_CALL)


def _ideogram() -> Built:
    """The branch without text has weights of its own; the text encoder's layers up to the 36th are read."""
    taps = 13
    both = [transformer("Ideogram4Transformer2DModel", in_channels=16, llm_features_dim=taps * 32) for _ in range(2)]
    pipe = diffusers.Ideogram4Pipeline(
        scheduler=flow_matching(),
        vae=autoencoders.flux2(),
        text_encoder=language_encoders.qwen3_vl(layers=36).model,
        tokenizer=tokenizers.mistral(),
        transformer=both[0],
        unconditional_transformer=both[1],
    )
    call = {"prompt": PROMPT, "guidance_scale": 4.0, "guidance_schedule": None, "max_sequence_length": 32}
    return pipe, call | SIZE


def _krea() -> Built:
    pipe = diffusers.Krea2Pipeline(
        scheduler=flow_matching(use_dynamic_shifting=True),
        vae=autoencoders.qwen(),
        text_encoder=language_encoders.qwen3_vl().model,
        tokenizer=tokenizers.qwen(),
        transformer=transformer("Krea2Transformer2DModel"),
        text_encoder_select_layers=(0, 1, 2),
    )
    return pipe, _CALL | {"max_sequence_length": 200}


def longcat_parts(levels: int = 4) -> dict[str, Any]:
    """The autoencoder divides each side by 2 ** (levels - 1)."""
    return {
        "scheduler": flow_matching(use_dynamic_shifting=True),
        "vae": autoencoders.kl(latent_channels=16, quant_conv=False, scaling_factor=0.36, levels=levels),
        "text_encoder": encoders.qwen(),
        "tokenizer": tokenizers.qwen(),
        "text_processor": encoders.ImageReader(tokenizers.qwen()),
        "transformer": transformer("LongCatImageTransformer2DModel", in_channels=64),
    }


def _longcat() -> Built:
    pipe = diffusers.LongCatImagePipeline(**longcat_parts())
    pipe.tokenizer_max_length = 64
    return pipe, _CALL | {"enable_prompt_rewrite": False}


def _nucleus() -> Built:
    pipe = diffusers.NucleusMoEImagePipeline(
        transformer=transformer("NucleusMoEImageTransformer2DModel"),
        scheduler=flow_matching(use_dynamic_shifting=True),
        vae=autoencoders.qwen(),
        text_encoder=language_encoders.qwen3_vl(),
        processor=encoders.ImageReader(tokenizers.mistral()),
    )
    return pipe, _CALL | {"return_index": -1}


def _ovis() -> Built:
    pipe = diffusers.OvisImagePipeline(
        scheduler=flow_matching(use_dynamic_shifting=True),
        vae=autoencoders.kl(quant_conv=False, scaling_factor=0.36),
        text_encoder=encoders.qwen3(),
        tokenizer=tokenizers.qwen(),
        transformer=transformer("OvisImageTransformer2DModel"),
    )
    return pipe, _CALL | {"max_sequence_length": 64}


def _prx_parts(**changes: Any) -> dict[str, Any]:
    return {
        "transformer": transformer("PRXTransformer2DModel", **changes),
        "scheduler": flow_matching(),
        "text_encoder": encoders.gemma(),
        "tokenizer": tokenizers.llama(),
    }


def _prx() -> Built:
    pipe = diffusers.PRXPipeline(**_prx_parts(), vae=autoencoders.kl(quant_conv=False, scaling_factor=0.36))
    call = {"use_resolution_binning": False, "skip_text_cleaning": True, "tokenizer_max_length": 32}
    return pipe, _CALL | call


def _prx_pixel() -> Built:
    pipe = diffusers.PRXPixelPipeline(**_prx_parts(in_channels=3, patch_size=4), prompt_max_tokens=32)
    return pipe, _CALL | {"use_resolution_binning": False, "height": 32, "width": 32, "output_type": "pt"}


_BUILD: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "ErnieImagePipeline": (_ernie, "one call"),
    "Ideogram4Pipeline": (_ideogram, "a call each"),
    "Krea2Pipeline": (_krea, "a call each"),
    "LongCatImagePipeline": (_longcat, "a call each"),
    "NucleusMoEImagePipeline": (_nucleus, "a call each"),
    "OvisImagePipeline": (_ovis, "a call each"),
    "PRXPipeline": (_prx, "one call"),
    "PRXPixelPipeline": (_prx_pixel, "one call"),
}

_ONE_PROMPT = ("PRXPipeline", "PRXPixelPipeline")
"""Pipelines whose own call fails for two prompts with guidance: they give the denoiser two times for four images."""

ENTRIES = tuple(
    Entry(name=name, build=build, guidance=guidance, prompts="" if name in _ONE_PROMPT else "prompt")
    for name, (build, guidance) in _BUILD.items()
)
