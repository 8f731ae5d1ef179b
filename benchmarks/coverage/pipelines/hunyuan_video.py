"""Pipelines of HunyuanVideo and what was made after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers

from tests.tiny import encoders, sample_images, tokenizers, video_transformer_pipelines
from tests.tiny.transformer_pipelines import flow_matching

from .entry import Built, Entry, Guidance, changed, derived

_HUNYUAN = video_transformer_pipelines.hunyuan_video
_IMAGE = {"image": sample_images.scene(64, 64)}
_LETTERED = 'a small red house that says "Hi"'
_HEADING = "<|end_header_id|>"
_SIGHT = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def siglip() -> dict[str, Any]:
    """What reads an image as four tokens."""
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    return {
        "feature_extractor": SiglipImageProcessor(size={"height": 28, "width": 28}),
        "image_encoder": SiglipVisionModel(SiglipVisionConfig(image_size=28, patch_size=14, **_SIGHT)),
    }


def _image_reader() -> dict[str, Any]:
    """A language model that sees an image, of four tokens, at one mark of the text; another mark ends a heading."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    tokenizer = copy.deepcopy(tokenizers.llama())
    tokenizer.add_tokens([_HEADING, "<image>"])
    text = copy.deepcopy(encoders.llama().config)
    text.vocab_size = len(tokenizer)
    vision = CLIPVisionConfig(image_size=28, patch_size=14, **_SIGHT)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=len(tokenizer) - 1, pad_token_id=0)
    return {"tokenizer": tokenizer, "text_encoder": LlavaForConditionalGeneration(config)}


def _small_images() -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(crop_size={"height": 28, "width": 28}, size={"shortest_edge": 28})


def _image_to_video() -> Built:
    """The first frame is given: its tokens have another time than the rest."""
    transformer = changed(_HUNYUAN()[0].transformer, image_condition_type="token_replace", guidance_embeds=False)
    positions = {"crop_start": 3, "image_emb_len": 4, "image_emb_start": 1, "image_emb_end": 5}
    template = f"{_HEADING}<image>{_HEADING}{{}}say{_HEADING}"
    call = _IMAGE | {"prompt_template": {"template": template, **positions}}
    parts = {"transformer": transformer, "image_processor": _small_images(), **_image_reader()}
    return derived(_HUNYUAN, "HunyuanVideoImageToVideoPipeline", call, **parts)


def _skyreels() -> Built:
    """The first frame comes as further channels."""
    transformer = changed(_HUNYUAN()[0].transformer, in_channels=8)
    return derived(_HUNYUAN, "HunyuanSkyreelsImageToVideoPipeline", _IMAGE, transformer=transformer)


def _framepack() -> Built:
    """Two sections of a video, the last one first, each of which sees the others the coarser the farther they are."""
    source = _HUNYUAN()[0].transformer.config
    accepted = ("in_channels", "out_channels", "num_attention_heads", "attention_head_dim", "num_layers")
    others = ("num_single_layers", "num_refiner_layers", "text_embed_dim", "pooled_projection_dim", "rope_axes_dim")
    more = {"has_image_proj": True, "image_proj_dim": 24, "has_clean_x_embedder": True}
    transformer = diffusers.HunyuanVideoFramepackTransformer3DModel(
        **{name: source[name] for name in (*accepted, *others)}, **more
    )
    call = _IMAGE | {"latent_window_size": 3, "num_frames": 18}
    return derived(_HUNYUAN, "HunyuanVideoFramepackPipeline", call, transformer=transformer, **siglip())


def _letters() -> dict[str, Any]:
    """What reads the text that is to be seen in the video, byte by byte."""
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    config = T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return {"tokenizer_2": ByT5Tokenizer(), "text_encoder_2": T5EncoderModel(config)}


def _hunyuan15(name: str, call: dict[str, Any], **parts: Callable[[], Any]) -> Callable[[], Built]:
    """Two texts and an image before the tokens; guidance is an object of its own."""

    def build() -> Built:
        transformer = diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            num_refiner_layers=1,
            text_embed_dim=32,
            text_embed_2_dim=16,
            image_embed_dim=24,
            rope_axes_dim=(4, 4, 4),
            target_size=128,
        )
        vae = diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
        )
        pipe = getattr(diffusers, name)(
            text_encoder=encoders.qwen().model.language_model,
            tokenizer=tokenizers.qwen(),
            transformer=transformer,
            vae=vae,
            scheduler=flow_matching(shift=7.0),
            guider=diffusers.ClassifierFreeGuidance(guidance_scale=4.0),
            **_letters(),
            **{part: value for make in parts.values() for part, value in make().items()},
        )
        pipe.system_message, pipe.prompt_template_encode_start_idx = "Tell.", 8
        pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 64, 16, 4
        return pipe, {"prompt": _LETTERED, "num_frames": 9} | call

    return build


_BUILD: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "HunyuanVideoImageToVideoPipeline": (_image_to_video, "a call each"),
    "HunyuanSkyreelsImageToVideoPipeline": (_skyreels, "a call each"),
    "HunyuanVideoFramepackPipeline": (_framepack, "a call each"),
    "HunyuanVideo15Pipeline": (
        _hunyuan15("HunyuanVideo15Pipeline", {"height": 128, "width": 128}),
        "a call each",
    ),
    "HunyuanVideo15ImageToVideoPipeline": (
        _hunyuan15("HunyuanVideo15ImageToVideoPipeline", {"image": sample_images.scene()}, sight=siglip),
        "a call each",
    ),
}

_ONE_IMAGE = (
    "HunyuanVideoImageToVideoPipeline",
    "HunyuanVideoFramepackPipeline",
    "HunyuanVideo15ImageToVideoPipeline",
)
"""They take one image for all prompts, and no list."""

ENTRIES = tuple(
    Entry(name=name, build=build, guidance=guidance, prompts="" if name in _ONE_IMAGE else "prompt")
    for name, (build, guidance) in _BUILD.items()
)
