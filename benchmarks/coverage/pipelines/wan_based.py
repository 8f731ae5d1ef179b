"""Pipelines around transformers that were made after Wan's, with its VAE and its text encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers

from tests.tiny import conditioned_pipelines, encoders, sample_images, video_transformer_pipelines

from .entry import Built, Entry, Guidance, changed, derived

_WAN = video_transformer_pipelines.wan
_IMAGE = {"image": sample_images.scene(64, 64)}
_SIZES = ("patch_size", "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim")
_MORE = ("freq_dim", "ffn_dim", "num_layers", "rope_max_seq_len")


def like_wan(kind: Any, leave: tuple[str, ...] = (), **changes: Any) -> Any:
    """A transformer of another class with the sizes of Wan's, without the options `leave`."""
    source = _WAN()[0].transformer.config
    taken = {name: source[name] for name in (*_SIZES, *_MORE) if name not in leave}
    return kind(**taken | changes)


def _chrono_edit() -> Built:
    more = {"in_channels": 36, "image_dim": 32, "added_kv_proj_dim": 48}
    transformer = like_wan(diffusers.ChronoEditTransformer3DModel, **more)
    parts = encoders.clip_image_reader() | {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    return derived(_WAN, "ChronoEditPipeline", _IMAGE, transformer=transformer, **parts)


def _lucy_edit() -> Built:
    transformer = changed(_WAN()[0].transformer, in_channels=32)
    return derived(_WAN, "LucyEditPipeline", {"video": sample_images.video()}, transformer=transformer)


def _any_flow() -> Built:
    transformer = like_wan(diffusers.AnyFlowTransformer3DModel, ("rope_max_seq_len",), attention_head_dim=16)
    parts = {"transformer": transformer, "scheduler": diffusers.FlowMapEulerDiscreteScheduler()}
    return derived(_WAN, "AnyFlowPipeline", {"guidance_scale": 4.0}, **parts)


def _any_flow_far() -> Built:
    """Frames in two chunks, of which the second sees the keys of the first."""
    transformer = like_wan(diffusers.AnyFlowFARTransformer3DModel, ("rope_max_seq_len",), attention_head_dim=16)
    parts = {"transformer": transformer, "scheduler": diffusers.FlowMapEulerDiscreteScheduler()}
    call = {"guidance_scale": 4.0, "chunk_partition": [1, 2]}
    return derived(_WAN, "AnyFlowFARPipeline", call, **parts)


def _skyreels_image() -> Built:
    more = {"in_channels": 36, "image_dim": 32, "added_kv_proj_dim": 48}
    transformer = like_wan(diffusers.SkyReelsV2Transformer3DModel, **more)
    return derived(
        _WAN, "SkyReelsV2ImageToVideoPipeline", _IMAGE, transformer=transformer, **encoders.clip_image_reader()
    )


def _forcing(name: str, call: dict[str, Any]) -> Callable[[], Built]:
    """Every frame has a time and a scheduler of its own."""
    return lambda: derived(conditioned_pipelines.skyreels_forcing, name, call)


def _helios(name: str, call: dict[str, Any], **scheduler: Any) -> Callable[[], Built]:
    """Three frames at a time, before which stand those that were drawn before, the older the coarser."""

    def build() -> Built:
        transformer = like_wan(diffusers.HeliosTransformer3DModel, ("rope_max_seq_len",), rope_dim=(4, 4, 4))
        history = {"history_sizes": [4, 2, 1], "num_latent_frames_per_chunk": 3, "num_frames": 18}
        parts = {"transformer": transformer, "scheduler": diffusers.HeliosScheduler(**scheduler)}
        return derived(_WAN, name, history | call, **parts)

    return build


_CONTINUED = {"video": sample_images.video(), "num_frames": 17, "overlap_history": 5}
_PYRAMID = {"pyramid_num_inference_steps_list": [1, 1], "height": 64, "width": 64}
_BUILD: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "ChronoEditPipeline": (_chrono_edit, "a call each"),
    "LucyEditPipeline": (_lucy_edit, "a call each"),
    "AnyFlowPipeline": (_any_flow, "one call"),
    "AnyFlowFARPipeline": (_any_flow_far, "one call"),
    "SkyReelsV2ImageToVideoPipeline": (_skyreels_image, "a call each"),
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": (
        _forcing("SkyReelsV2DiffusionForcingImageToVideoPipeline", _IMAGE),
        "a call each",
    ),
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": (
        _forcing("SkyReelsV2DiffusionForcingVideoToVideoPipeline", _CONTINUED),
        "a call each",
    ),
    "HeliosPipeline": (_helios("HeliosPipeline", {}, stages=1, stage_range=[0, 1]), "a call each"),
    "HeliosPyramidPipeline": (
        _helios("HeliosPyramidPipeline", _PYRAMID, stages=2, stage_range=[0, 0.5, 1], gamma=0.3),
        "a call each",
    ),
}

_ONE_IMAGE = (
    "ChronoEditPipeline",
    "SkyReelsV2ImageToVideoPipeline",
    "SkyReelsV2DiffusionForcingImageToVideoPipeline",
)
"""They take one image for all prompts, and no list."""

ENTRIES = tuple(
    Entry(name=name, build=build, guidance=guidance, prompts="" if name in _ONE_IMAGE else "prompt")
    for name, (build, guidance) in _BUILD.items()
)
