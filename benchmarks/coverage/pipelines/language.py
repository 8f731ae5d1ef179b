"""Pipelines of image transformers whose text is read by a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers

from tests.tiny import encoders, language_pipelines, sample_images, tokenizers

from .entry import CONTROL, IMAGE, MASKED, Built, Entry, Guidance, builder, changed, derived

_CONTROLLED = ("patch_size", "in_channels", "out_channels", "attention_head_dim", "num_attention_heads")


def _qwen_controlnet(name: str, call: dict[str, Any], extra_channels: int = 0) -> Callable[[], Built]:
    def build() -> Built:
        source = language_pipelines.qwen()[0].transformer.config
        taken = {option: source[option] for option in (*_CONTROLLED, "joint_attention_dim", "axes_dims_rope")}
        controlnet = diffusers.QwenImageControlNetModel(**taken, num_layers=1, extra_condition_channels=extra_channels)
        return derived(language_pipelines.qwen, name, CONTROL | call, controlnet=controlnet)

    return build


def _flux2_klein(name: str, call: dict[str, Any], **settings: Any) -> Callable[[], Built]:
    """The text is read by Qwen3 of three layers."""

    def build() -> Built:
        source = language_pipelines.flux2()[0]
        parts = {
            "text_encoder": changed_depth(encoders.qwen3(), 3),
            "tokenizer": tokenizers.qwen(),
            "transformer": changed(source.transformer, guidance_embeds=False),
        }
        return derived(language_pipelines.flux2, name, call, **parts, **settings)

    return build


def changed_depth(model: Any, layers: int) -> Any:
    """A language model of the same configuration with another number of layers."""
    from copy import deepcopy

    config = deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * layers
    return type(model)(config)


def _cogview_control() -> Built:
    transformer = changed(language_pipelines.cogview4()[0].transformer, in_channels=8)
    return derived(language_pipelines.cogview4, "CogView4ControlPipeline", CONTROL, transformer=transformer)


_QWEN, _ZIMAGE = language_pipelines.qwen, language_pipelines.zimage
_BUILD: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "QwenImagePipeline": (_QWEN, "a call each"),
    "QwenImageImg2ImgPipeline": (builder(_QWEN, "QwenImageImg2ImgPipeline", IMAGE), "a call each"),
    "QwenImageInpaintPipeline": (builder(_QWEN, "QwenImageInpaintPipeline", MASKED), "a call each"),
    "QwenImageControlNetPipeline": (_qwen_controlnet("QwenImageControlNetPipeline", {}), "a call each"),
    "QwenImageControlNetInpaintPipeline": (
        _qwen_controlnet("QwenImageControlNetInpaintPipeline", {"control_mask": sample_images.mask()}, 4),
        "a call each",
    ),
    "QwenImageEditPipeline": (language_pipelines.qwen_edit, "a call each"),
    "Flux2Pipeline": (language_pipelines.flux2, "none"),
    "Flux2KleinPipeline": (_flux2_klein("Flux2KleinPipeline", {"guidance_scale": 4.0}), "a call each"),
    "Flux2KleinInpaintPipeline": (
        _flux2_klein("Flux2KleinInpaintPipeline", MASKED | {"guidance_scale": 4.0}),
        "a call each",
    ),
    "Flux2KleinKVPipeline": (
        _flux2_klein("Flux2KleinKVPipeline", {"image": sample_images.scene()}, is_distilled=True),
        "none",
    ),
    "Lumina2Pipeline": (language_pipelines.lumina2, "a call each"),
    "CogView4Pipeline": (language_pipelines.cogview4, "a call each"),
    "CogView4ControlPipeline": (_cogview_control, "a call each"),
    "HiDreamImagePipeline": (language_pipelines.hidream, "one call"),
    "ZImagePipeline": (_ZIMAGE, "one call"),
    "ZImageImg2ImgPipeline": (builder(_ZIMAGE, "ZImageImg2ImgPipeline", IMAGE), "one call"),
    "ZImageInpaintPipeline": (builder(_ZIMAGE, "ZImageInpaintPipeline", MASKED), "one call"),
}

ENTRIES = tuple(Entry(name=name, build=build, guidance=guidance) for name, (build, guidance) in _BUILD.items())
