"""Pipelines of short films from UNets of images with layers of motion."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.tiny import image_pipelines, pictures, video_pipelines

from .entry import Built, Entry, derived

_LAYERS = {"motion_layers_per_block": 1, "motion_norm_num_groups": 8, "motion_num_attention_heads": 4}


def _motion(**changes: Any) -> Any:
    options = {"block_out_channels": (16, 32, 32), "use_motion_mid_block": False, **_LAYERS}
    return diffusers.MotionAdapter(**options | changes)


def _xl() -> Built:
    call = {"num_frames": 3}
    return derived(image_pipelines.sdxl, "AnimateDiffSDXLPipeline", call, motion_adapter=_motion())


def _sparse() -> Built:
    """One of three frames is given."""
    controlnet = diffusers.SparseControlNetModel(
        conditioning_channels=3,
        down_block_types=("CrossAttnDownBlockMotion", "CrossAttnDownBlockMotion", "DownBlockMotion"),
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=4,
        motion_num_attention_heads=4,
        conditioning_embedding_out_channels=(8, 8, 16, 16),
        use_simplified_condition_embedding=False,
    )
    call = {"conditioning_frames": [pictures.scene()], "controlnet_frame_indices": [1]}
    parts: dict[str, Any] = {"motion_adapter": video_pipelines.animatediff()[0].motion_adapter}
    parts |= {"unet": image_pipelines.sd()[0].unet, "controlnet": controlnet}
    return derived(video_pipelines.animatediff, "AnimateDiffSparseControlNetPipeline", call, **parts)


ENTRIES = (
    Entry(name="AnimateDiffSDXLPipeline", build=_xl),
    Entry(name="AnimateDiffSparseControlNetPipeline", build=_sparse),
)
