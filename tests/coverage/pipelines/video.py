"""Pipelines of video: transformers, and UNets with temporal layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers

from tests.tiny import (
    encoders,
    image_pipelines,
    pictures,
    transformer_pipelines,
    video_pipelines,
    video_transformer_pipelines,
)

from .entry import Built, Entry, Guidance, changed, derived
from .unets_sd import controlnet

_FILM_IMAGE = {"image": pictures.scene(64, 64)}


def _film(frames: int = 9, size: int = 64) -> list[Any]:
    """One image that is turned a little further in every frame."""
    return [pictures.scene(size, size).rotate(4 * number) for number in range(frames)]


def _of(source: Callable[[], Built], name: str, call: dict[str, Any]) -> Callable[[], Built]:
    return lambda: derived(source, name, call)


def _with(
    source: Callable[[], Built], name: str, call: dict[str, Any], network: str, **changes: Any
) -> Callable[[], Built]:
    """Of the components of `source`, one network of them changed."""

    def build() -> Built:
        other = changed(source()[0].components[network], **changes)
        return derived(source, name, call, **{network: other})

    return build


def _ti2v() -> Built:
    """Wan 2.2 TI2V 5B: every token has a timestep of its own."""
    call = _FILM_IMAGE | {"guidance_scale": 4.0}
    return derived(
        video_transformer_pipelines.wan, "WanImageToVideoPipeline", call, expand_timesteps=True, transformer_2=None
    )


def _ltx_condition() -> Built:
    parts = {"scheduler": transformer_pipelines.flow_matching()}
    return derived(video_transformer_pipelines.ltx, "LTXConditionPipeline", _FILM_IMAGE, **parts)


def _vace() -> Built:
    source = video_transformer_pipelines.wan()[0].transformer
    config = {name: value for name, value in source.config.items() if not name.startswith("_")}
    accepted = ("patch_size", "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim")
    taken = {name: config[name] for name in (*accepted, "freq_dim", "ffn_dim", "num_layers", "rope_max_seq_len")}
    transformer = diffusers.WanVACETransformer3DModel(**taken, vace_layers=[0], vace_in_channels=96)
    call = {"video": _film()}
    return derived(video_transformer_pipelines.wan, "WanVACEPipeline", call, transformer=transformer)


def _skyreels(name: str, call: dict[str, Any], **more: Any) -> Callable[[], Built]:
    def build() -> Built:
        source = video_transformer_pipelines.wan()[0].transformer.config
        accepted = ("patch_size", "num_attention_heads", "attention_head_dim", "in_channels", "out_channels")
        others = ("text_dim", "freq_dim", "ffn_dim", "num_layers", "rope_max_seq_len")
        taken = {option: source[option] for option in (*accepted, *others)}
        transformer = diffusers.SkyReelsV2Transformer3DModel(**taken | more)
        parts: dict[str, Any] = {"transformer": transformer}
        if "image_dim" in more:
            parts |= {"image_processor": encoders.clip_image_processor(), "image_encoder": encoders.clip_vision()}
        return derived(video_transformer_pipelines.wan, name, call, **parts)

    return build


def _animate(name: str, call: dict[str, Any], *, with_controlnet: bool = False) -> Callable[[], Built]:
    def build() -> Built:
        parts: dict[str, Any] = {"motion_adapter": video_pipelines.animatediff()[0].motion_adapter}
        parts["unet"] = image_pipelines.sd()[0].unet
        if with_controlnet:
            parts["controlnet"] = controlnet()
        return derived(video_pipelines.animatediff, name, call, **parts)

    return build


_FRAMES = {"video": _film(3, 128), "strength": 0.99}
_CONDITIONING = {"conditioning_frames": _film(3, 128)}
_WAN, _LTX, _COG = (
    video_transformer_pipelines.wan,
    video_transformer_pipelines.ltx,
    video_transformer_pipelines.cogvideox,
)
_FORCING = {"base_num_frames": 9, "num_frames": 9, "guidance_scale": 4.0}
_BUILD: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "WanPipeline": (_WAN, "a call each"),
    "WanImageToVideoPipeline": (_ti2v, "a call each"),
    "WanVideoToVideoPipeline": (
        _of(_WAN, "WanVideoToVideoPipeline", {"video": _film(), "strength": 0.99}),
        "a call each",
    ),
    "WanVACEPipeline": (_vace, "a call each"),
    "LTXPipeline": (_LTX, "one call"),
    "LTXImageToVideoPipeline": (_of(_LTX, "LTXImageToVideoPipeline", _FILM_IMAGE), "one call"),
    "LTXConditionPipeline": (_ltx_condition, "one call"),
    "CogVideoXPipeline": (_COG, "one call"),
    "CogVideoXVideoToVideoPipeline": (
        _of(_COG, "CogVideoXVideoToVideoPipeline", {"video": _film(), "strength": 0.99}),
        "one call",
    ),
    "CogVideoXImageToVideoPipeline": (
        _with(_COG, "CogVideoXImageToVideoPipeline", _FILM_IMAGE, "transformer", in_channels=8),
        "one call",
    ),
    "CogVideoXFunControlPipeline": (
        _with(_COG, "CogVideoXFunControlPipeline", {"control_video": _film()}, "transformer", in_channels=8),
        "one call",
    ),
    "HunyuanVideoPipeline": (video_transformer_pipelines.hunyuan_video, "a call each"),
    "SkyReelsV2Pipeline": (_skyreels("SkyReelsV2Pipeline", {"guidance_scale": 4.0}), "a call each"),
    "SkyReelsV2DiffusionForcingPipeline": (
        _skyreels("SkyReelsV2DiffusionForcingPipeline", _FORCING),
        "a call each",
    ),
    "StableVideoDiffusionPipeline": (video_pipelines.svd, "one call"),
    "AnimateDiffPipeline": (video_pipelines.animatediff, "one call"),
    "AnimateDiffControlNetPipeline": (
        _animate("AnimateDiffControlNetPipeline", _CONDITIONING, with_controlnet=True),
        "one call",
    ),
    "AnimateDiffVideoToVideoPipeline": (_animate("AnimateDiffVideoToVideoPipeline", _FRAMES), "one call"),
    "AnimateDiffVideoToVideoControlNetPipeline": (
        _animate("AnimateDiffVideoToVideoControlNetPipeline", _FRAMES | _CONDITIONING, with_controlnet=True),
        "one call",
    ),
    "AnimateDiffPAGPipeline": (_animate("AnimateDiffPAGPipeline", {"pag_scale": 2.0}), "one call"),
    "TextToVideoSDPipeline": (video_pipelines.text_to_video, "one call"),
    "VideoToVideoSDPipeline": (
        _of(video_pipelines.text_to_video, "VideoToVideoSDPipeline", _FRAMES),
        "one call",
    ),
}

_NO_BATCH = (
    "AnimateDiffControlNetPipeline",
    "AnimateDiffVideoToVideoControlNetPipeline",
    "CogVideoXFunControlPipeline",
    "StableVideoDiffusionPipeline",
)
"""Without a prompt, or with one control video whose calls fail for several prompts in plain diffusers too."""

ENTRIES = tuple(
    Entry(name=name, build=build, guidance=guidance, prompts="" if name in _NO_BATCH else "prompt")
    for name, (build, guidance) in _BUILD.items()
)
