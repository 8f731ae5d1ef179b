"""Pipelines of LTX Video and LTX-2: tokens with times of their own, sound beside the frames, tiles in time."""

from __future__ import annotations

from collections.abc import Callable

import diffusers
import torch
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from tests.tiny import conditioned_pipelines, sample_images, video_transformer_pipelines
from tests.tiny.image_pipelines import PROMPT
from tests.tiny.transformer_pipelines import flow_matching

from .entry import Built, Entry, Guidance, builder, changed, derived

_LTX2 = conditioned_pipelines.ltx2
_REFERENCE = sample_images.scene(32, 32)
_KEYFRAMES = {"use_keyframes_abs_pos_embedding": True}


def _long() -> Built:
    """Windows of time, each with a prompt of its own and the end of the one before."""
    windows = {"num_frames": 33, "temporal_tile_size": 24, "temporal_overlap": 8, "num_inference_steps": 2}
    call = windows | {"prompt": f"{PROMPT}|a pine", "cond_image": sample_images.scene(64, 64), "guidance_scale": 3.0}
    parts = {"scheduler": flow_matching()}
    name = "LTXI2VLongMultiPromptPipeline"
    return derived(video_transformer_pipelines.ltx, name, call | {"skip_steps_sigma_threshold": None}, **parts)


def _in_context() -> Built:
    """The frames of another video come as tokens after those that are noisy."""
    from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition  # older versions have none

    given = [LTX2ReferenceCondition(frames=[_REFERENCE] * 5, strength=1.0)]
    return derived(_LTX2, "LTX2InContextPipeline", {"reference_conditions": given})


def _hdr() -> Built:
    from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition  # older versions have none

    given = [LTX2HDRReferenceCondition(frames=[_REFERENCE] * 5)]
    return derived(_LTX2, "LTX2HDRPipeline", {"reference_conditions": given, "guidance_scale": 3.0})


def _dfr() -> Built:
    """Keyframes are drawn with the video, as tokens after it."""
    transformer, call = changed(_LTX2()[0].transformer, **_KEYFRAMES), {"sigmas": [1.0, 0.5], "num_frames": 13}
    return derived(_LTX2, "LTX2DFRPipeline", call, transformer=transformer, scheduler=flow_matching())


def _dfr_refined() -> Built:
    """Twice as many frames, in tiles of time between keyframes."""
    source = _LTX2()[0]
    parts = {
        "transformer": changed(source.transformer, **_KEYFRAMES),
        "scheduler": diffusers.LTXEulerAncestralRFScheduler(),
        "temporal_latent_upsampler": LTX2LatentUpsamplerModel(
            in_channels=4, mid_channels=32, num_blocks_per_stage=1, spatial_upsample=False, temporal_upsample=True
        ),
    }
    noise = torch.Generator().manual_seed(1)
    call = {
        "latents": torch.randn(1, 4, 4, 8, 8, generator=noise),
        "keyframes_latents": torch.randn(1, 4, 1, 8, 8, generator=noise),
        "keyframe_positions": [12],
        "audio_latents": torch.randn(1, 2, 13, 2, generator=noise),
        "sigmas": [0.9, 0.5],
        "num_frames": 13,
    }
    return derived(_LTX2, "LTX2DFRTemporalRefinePipeline", call, **parts)


_BUILD: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "LTX2Pipeline": (conditioned_pipelines.ltx2, "one call"),
    "LTX2ImageToVideoPipeline": (
        builder(conditioned_pipelines.ltx2_image, "LTX2ImageToVideoPipeline", {"image_crf": 0}),
        "one call",
    ),
    "LTX2ConditionPipeline": (conditioned_pipelines.ltx2_condition, "one call"),
    "LTX2InContextPipeline": (_in_context, "one call"),
    "LTX2HDRPipeline": (_hdr, "one call"),
    "LTX2DFRPipeline": (_dfr, "none"),
    "LTX2DFRTemporalRefinePipeline": (_dfr_refined, "none"),
    "LTXI2VLongMultiPromptPipeline": (_long, "one call"),
}
_ONE_AT_A_TIME = ("LTXI2VLongMultiPromptPipeline", "LTX2DFRTemporalRefinePipeline")

ENTRIES = tuple(
    Entry(name=name, build=build, guidance=guidance, prompts="" if name in _ONE_AT_A_TIME else "prompt")
    for name, (build, guidance) in _BUILD.items()
)
