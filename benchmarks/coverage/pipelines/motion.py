"""Pipelines of short videos from UNets of images with layers of motion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers

from tests.tiny import encoders, image_pipelines, sample_images, video_pipelines

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
    call = {"conditioning_frames": [sample_images.scene()], "controlnet_frame_indices": [1]}
    parts: dict[str, Any] = {"motion_adapter": video_pipelines.animatediff()[0].motion_adapter}
    parts |= {"unet": image_pipelines.sd()[0].unet, "controlnet": controlnet}
    return derived(video_pipelines.animatediff, "AnimateDiffSparseControlNetPipeline", call, **parts)


def _pia() -> Built:
    """The image is beside the noise, with a mask that says how much each frame is like it."""
    parts = {"motion_adapter": _motion(conv_in_channels=9), "unet": image_pipelines.sd()[0].unet}
    return derived(video_pipelines.animatediff, "PIAPipeline", {"image": sample_images.scene()}, **parts)


def _i2vgen() -> Built:
    unet = diffusers.I2VGenXLUNet(
        sample_size=16,
        down_block_types=("CrossAttnDownBlock3D", "CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D", "CrossAttnUpBlock3D"),
        block_out_channels=(32, 32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    parts = {"image_encoder": encoders.clip_vision(), "feature_extractor": encoders.clip_image_processor()}
    call = {"image": sample_images.scene()}
    pipe, arguments = derived(video_pipelines.text_to_video, "I2VGenXLPipeline", call, unet=unet, **parts)
    return pipe, arguments | {"clip_skip": None}  # its default needs text encoders as transformers had them before 5


def _zero(source: Callable[[], Built], name: str) -> Callable[[], Built]:
    """Frames of one image that is moved; each sees the first in its self-attention."""

    def build() -> Built:
        call = {"video_length": 3, "t0": 1, "t1": 2, "num_inference_steps": 4}
        return derived(source, name, call, scheduler=diffusers.DDIMScheduler(clip_sample=False))

    return build


_ZERO = {
    "TextToVideoZeroPipeline": image_pipelines.sd,
    "TextToVideoZeroSDXLPipeline": image_pipelines.sdxl,
}
"""Of one prompt only."""

ENTRIES = (
    Entry(name="AnimateDiffSDXLPipeline", build=_xl),
    Entry(name="AnimateDiffSparseControlNetPipeline", build=_sparse),
    Entry(name="PIAPipeline", build=_pia),
    Entry(name="I2VGenXLPipeline", build=_i2vgen),
    *(Entry(name=name, build=_zero(source, name), prompts="") for name, source in _ZERO.items()),
)
