"""Kandinsky 5 and 6 in small: transformers whose latents have their channels last."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders, encoders, sample_images, tokenizers
from .image_pipelines import PROMPT, Built
from .transformer_pipelines import flow_matching

SIZE = {"height": 64, "width": 64}
VIDEO = {
    "prompt": PROMPT,
    "negative_prompt": "blurred",
    "guidance_scale": 3.0,
    "num_frames": 9,
    "max_sequence_length": 32,
    **SIZE,
}
_IMAGE = {"prompt": PROMPT, "negative_prompt": "blurred", "max_sequence_length": 64, **SIZE}
_TRANSFORMER = {
    "in_text_dim": 32,
    "in_text_dim2": 32,
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "time_dim": 24,
    "model_dim": 36,
    "ff_dim": 72,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 4, 4),
    "visual_cond": True,
}


def _texts(most: int = 1000) -> dict[str, Any]:
    return {
        "text_encoder": encoders.qwen(),
        "tokenizer": encoders.ImageReader(tokenizers.qwen(), most),
        "text_encoder_2": encoders.clip_text(),
        "tokenizer_2": tokenizers.clip(),
    }


def _fifth(kind: Any, vae: Any, **changes: Any) -> Any:
    """What is said to the language model about its task would be most of its text: a word of it is left."""
    transformer = diffusers.Kandinsky5Transformer3DModel(**_TRANSFORMER | changes)
    pipe = kind(**_texts(), vae=vae, transformer=transformer, scheduler=flow_matching(shift=5.0))
    pipe.prompt_template, pipe.prompt_template_encode_start_idx = "Describe: {}", 10
    pipe.resolutions = [(64, 64)]
    return pipe


def text_to_video5() -> Built:
    return _fifth(diffusers.Kandinsky5T2VPipeline, autoencoders.hunyuan()), VIDEO


def image_to_video5() -> Built:
    """The first frames are brought to the mean of those behind the fourth, so that there have to be such."""
    call = VIDEO | {"image": sample_images.scene(64, 64), "num_frames": 25}
    return _fifth(diffusers.Kandinsky5I2VPipeline, autoencoders.hunyuan()), call


def _image_vae() -> Any:
    return autoencoders.kl(quant_conv=False)


def text_to_image5() -> Built:
    pipe = _fifth(diffusers.Kandinsky5T2IPipeline, _image_vae(), visual_cond=False)
    return pipe, dict(_IMAGE)


def image_to_image5() -> Built:
    """The image is seen by the language model as well."""
    pipe = _fifth(diffusers.Kandinsky5I2IPipeline, _image_vae())
    pipe.prompt_template = "Describe: {}<|vision_start|><|image_pad|><|vision_end|>"
    return pipe, _IMAGE | {"image": sample_images.scene(64, 64)}


def text_to_video6() -> Built:
    """Video and sound, of an image and a text. The first 129 tokens of its text are left out, whatever they are."""
    more = {"in_audio_dim": 6, "out_audio_dim": 6, "ca_rope": True, "cross_gates": True}
    pipe = diffusers.Kandinsky6TI2VAPipeline(
        **_texts(most=160),
        vae=autoencoders.hunyuan(),
        transformer=diffusers.Kandinsky6Transformer3DModel(**_TRANSFORMER | more, visual_token_type_num_embeddings=2),
        scheduler=flow_matching(shift=5.0),
        audio_vae=diffusers.MMAudioVAE(mel_bins=8, latent_channels=6, hidden_channels=8),
        vocoder=diffusers.MMAudioVocoder(num_mels=8, upsample_initial_channel=64),
    )
    return pipe, VIDEO | {"image": sample_images.scene(64, 64)}


def super_resolution6() -> Built:
    """Tiles of 64 pixels a side are 8 x 8 tokens, the least that its attention takes."""
    transformer = diffusers.Kandinsky6SRTransformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        time_dim=24,
        model_dim=48,
        ff_dim=64,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        nabla_window=(3, 1, 1),
        tile_sizes=((64, 64),),
    )
    vae = diffusers.Kandinsky6SRVAE(
        latent_channels=4,
        encoder_block_out_channels=(4, 8, 8, 8),
        decoder_block_out_channels=(4, 8, 8, 8),
        layers_per_block=1,
    )
    pipe = diffusers.Kandinsky6SRPipeline(transformer=transformer, vae=vae, scheduler=flow_matching(shift=5.0))
    video = sample_images.video(5, 32)
    return pipe, {"video": video, "resolution_scale": 2, "output_type": "pt"}
