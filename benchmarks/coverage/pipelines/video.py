"""Pipelines of video: transformers, and UNets with temporal layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers

from tests.tiny import (
    image_pipelines,
    sample_images,
    transformer_pipelines,
    video_pipelines,
    video_transformer_pipelines,
)

from .entry import THREE, Built, Entry, Guidance, builder, changed, derived
from .unets_sd import controlnet
from .wan_based import like_wan

_VIDEO_IMAGE = {"image": sample_images.scene(64, 64)}


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
    call = _VIDEO_IMAGE | {"guidance_scale": 4.0}
    return derived(
        video_transformer_pipelines.wan, "WanImageToVideoPipeline", call, expand_timesteps=True, transformer_2=None
    )


def _ltx_condition() -> Built:
    parts = {"scheduler": transformer_pipelines.flow_matching()}
    return derived(video_transformer_pipelines.ltx, "LTXConditionPipeline", _VIDEO_IMAGE, **parts)


def _vace() -> Built:
    transformer = like_wan(diffusers.WanVACETransformer3DModel, vace_layers=[0], vace_in_channels=96)
    call = {"video": sample_images.video()}
    return derived(video_transformer_pipelines.wan, "WanVACEPipeline", call, transformer=transformer)


def _skyreels() -> Any:
    return like_wan(diffusers.SkyReelsV2Transformer3DModel)


def _animate(name: str, call: dict[str, Any], *, with_controlnet: bool = False) -> Callable[[], Built]:
    def build() -> Built:
        parts: dict[str, Any] = {"motion_adapter": video_pipelines.animatediff()[0].motion_adapter}
        parts["unet"] = image_pipelines.sd()[0].unet
        if with_controlnet:
            parts["controlnet"] = controlnet()
        return derived(video_pipelines.animatediff, name, call, **parts)

    return build


_FRAMES = {"video": sample_images.video(3, 128), "strength": 0.99}
_CONDITIONING = {"conditioning_frames": sample_images.video(3, 128)}
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
        builder(_WAN, "WanVideoToVideoPipeline", {"video": sample_images.video(), "strength": 0.99}),
        "a call each",
    ),
    "WanVACEPipeline": (_vace, "a call each"),
    "LTXPipeline": (_LTX, "one call"),
    "LTXImageToVideoPipeline": (builder(_LTX, "LTXImageToVideoPipeline", _VIDEO_IMAGE), "one call"),
    "LTXConditionPipeline": (_ltx_condition, "one call"),
    "CogVideoXPipeline": (_COG, "one call"),
    "CogVideoXVideoToVideoPipeline": (
        builder(_COG, "CogVideoXVideoToVideoPipeline", {"video": sample_images.video(), "strength": 0.99}),
        "one call",
    ),
    "CogVideoXImageToVideoPipeline": (
        _with(_COG, "CogVideoXImageToVideoPipeline", _VIDEO_IMAGE, "transformer", in_channels=8),
        "one call",
    ),
    "CogVideoXFunControlPipeline": (
        _with(
            _COG, "CogVideoXFunControlPipeline", {"control_video": sample_images.video()}, "transformer", in_channels=8
        ),
        "one call",
    ),
    "HunyuanVideoPipeline": (video_transformer_pipelines.hunyuan_video, "a call each"),
    "SkyReelsV2Pipeline": (
        builder(_WAN, "SkyReelsV2Pipeline", {"guidance_scale": 4.0}, transformer=_skyreels),
        "a call each",
    ),
    "SkyReelsV2DiffusionForcingPipeline": (
        builder(_WAN, "SkyReelsV2DiffusionForcingPipeline", _FORCING, transformer=_skyreels),
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
    "AnimateDiffPAGPipeline": (_animate("AnimateDiffPAGPipeline", {"pag_scale": 2.0}), THREE),
    "TextToVideoSDPipeline": (video_pipelines.text_to_video, "one call"),
    "VideoToVideoSDPipeline": (
        builder(video_pipelines.text_to_video, "VideoToVideoSDPipeline", _FRAMES),
        "one call",
    ),
}

_NO_BATCH = (
    "AnimateDiffControlNetPipeline",
    "AnimateDiffVideoToVideoControlNetPipeline",
    "CogVideoXFunControlPipeline",
    "StableVideoDiffusionPipeline",
    "VideoToVideoSDPipeline",
    "WanImageToVideoPipeline",
    "WanVACEPipeline",
)
"""Without a prompt, or with one image or video: calls with several prompts fail in plain diffusers too."""

ENTRIES = tuple(
    Entry(name=name, build=build, guidance=guidance, prompts="" if name in _NO_BATCH else "prompt")
    for name, (build, guidance) in _BUILD.items()
)
