"""Pipelines of image transformers that cut the latent into patches themselves and do not mix text among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers

from tests.tiny import autoencoders, encoders, tokenizers
from tests.tiny.image_pipelines import PROMPT, SIZE
from tests.tiny.transformer_pipelines import flow_matching
from tests.tiny.transformers import TRANSFORMERS

from .entry import CONTROL, Built, Entry, derived, in_one_call

_CALL: dict[str, Any] = {"prompt": PROMPT, "negative_prompt": "blurred", **SIZE}
_WHOLE = {"use_resolution_binning": False}


def _hunyuan_dit() -> Built:
    """Its texts have 77 and 256 tokens, whatever they say."""
    config = dict(TRANSFORMERS["HunyuanDiT2DModel"].config) | {"text_len": 77, "text_len_t5": 256}
    pipe = diffusers.HunyuanDiTPipeline(
        vae=autoencoders.kl(),
        text_encoder=encoders.clip_text(),
        tokenizer=tokenizers.clip(),
        transformer=diffusers.HunyuanDiT2DModel(**config),
        scheduler=diffusers.DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        text_encoder_2=encoders.t5(),
        tokenizer_2=tokenizers.t5(),
    )
    return pipe, _CALL | _WHOLE


def _hunyuan_dit_pag() -> Built:
    return derived(_hunyuan_dit, "HunyuanDiTPAGPipeline", {"pag_scale": 2.0}, pag_applied_layers="blocks.1")


def _hunyuan_dit_controlnet() -> Built:
    config = _hunyuan_dit()[0].transformer.config
    taken = inspect.signature(diffusers.HunyuanDiT2DControlNetModel.__init__).parameters.keys() & config.keys()
    controlnet = diffusers.HunyuanDiT2DControlNetModel(
        **{name: config[name] for name in taken}, transformer_num_layers=config["num_layers"]
    )
    return derived(_hunyuan_dit, "HunyuanDiTControlNetPipeline", CONTROL, controlnet=controlnet)


def _cogview3() -> Built:
    config = dict(TRANSFORMERS["CogView3PlusTransformer2DModel"].config) | {"num_layers": 2}
    pipe = diffusers.CogView3PlusPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=encoders.t5(),
        vae=autoencoders.kl(),
        transformer=diffusers.CogView3PlusTransformer2DModel(**config),
        scheduler=diffusers.CogVideoXDDIMScheduler(snr_shift_scale=4.0),
    )
    return pipe, _CALL | {"max_sequence_length": 32}


def _lumina() -> Built:
    config = dict(TRANSFORMERS["LuminaNextDiT2DModel"].config) | {"num_layers": 2}
    transformer = diffusers.LuminaNextDiT2DModel(**config)
    transformer.pad_token.data.zero_()  # the class leaves it as it is
    pipe = diffusers.LuminaPipeline(
        transformer=transformer,
        scheduler=flow_matching(),
        vae=autoencoders.kl(quant_conv=False, scaling_factor=0.36),
        text_encoder=encoders.gemma(),
        tokenizer=tokenizers.llama(),
    )
    pipe.max_sequence_length = 32
    return pipe, _CALL | {"clean_caption": False, "max_sequence_length": 32}


_BUILD: dict[str, Callable[[], Built]] = {
    "HunyuanDiTPipeline": _hunyuan_dit,
    "HunyuanDiTPAGPipeline": _hunyuan_dit_pag,
    "HunyuanDiTControlNetPipeline": _hunyuan_dit_controlnet,
    "CogView3PlusPipeline": _cogview3,
    "LuminaPipeline": _lumina,
}


ENTRIES = tuple(Entry(name=name, build=build, guidance=in_one_call(name)) for name, build in _BUILD.items())
