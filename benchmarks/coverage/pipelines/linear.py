"""Pipelines whose denoisers have linear attention (Sana), and those of Wan that animate an image."""

from __future__ import annotations

from collections.abc import Callable

import diffusers

from tests.tiny import encoders, linear_pipelines, sample_images, video_transformer_pipelines

from .entry import THREE, Built, Entry, Guidance, builder, configuration, derived


def _controlnet() -> Built:
    dropped = ("out_channels", "guidance_embeds", "guidance_embeds_scale", "qk_norm", "timestep_scale")
    given = configuration(linear_pipelines.transformer())
    config = {name: value for name, value in given.items() if name not in dropped}
    controlnet = diffusers.SanaControlNetModel(**config | {"num_layers": 1})
    call = {"control_image": sample_images.scene(32, 32)}
    return derived(linear_pipelines.sana, "SanaControlNetPipeline", call, controlnet=controlnet)


def _animate() -> Built:
    """An image that moves as the pose and the face of a video do."""
    transformer = diffusers.WanAnimateTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=36,
        latent_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=64,
        image_dim=32,
        added_kv_proj_dim=48,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=16,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    sight = encoders.clip_image_reader()
    video = sample_images.video(5)
    call = {
        "image": sample_images.scene(64, 64),
        "pose_video": video,
        "face_video": [frame.resize((16, 16)) for frame in video],
        "segment_frame_length": 5,
        "guidance_scale": 4.0,
    }
    return derived(video_transformer_pipelines.wan, "WanAnimatePipeline", call, transformer=transformer, **sight)


_SANA, _SPRINT, _VIDEO = linear_pipelines.sana, linear_pipelines.sana_sprint, linear_pipelines.sana_video
_BUILD: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "SanaPipeline": (_SANA, "one call"),
    "SanaControlNetPipeline": (_controlnet, "one call"),
    "SanaPAGPipeline": (builder(_SANA, "SanaPAGPipeline", {"pag_scale": 2.0}), THREE),
    "SanaSprintPipeline": (_SPRINT, "none"),
    "SanaSprintImg2ImgPipeline": (
        builder(_SPRINT, "SanaSprintImg2ImgPipeline", {"image": sample_images.scene(32, 32), "strength": 0.99}),
        "none",
    ),
    "SanaVideoPipeline": (_VIDEO, "one call"),
    "SanaImageToVideoPipeline": (
        builder(_VIDEO, "SanaImageToVideoPipeline", {"image": sample_images.scene(64, 64)}),
        "one call",
    ),
    "SanaWMPipeline": (linear_pipelines.sana_world, "one call"),
    "WanAnimatePipeline": (_animate, "a call each"),
}

_OF_ONE_IMAGE = ("SanaImageToVideoPipeline", "SanaWMPipeline", "WanAnimatePipeline")
"""They take no list of images, one for each prompt."""

ENTRIES = tuple(
    Entry(name=name, build=build, guidance=guidance, prompts="" if name in _OF_ONE_IMAGE else "prompt")
    for name, (build, guidance) in _BUILD.items()
)
