"""Shap-E: a transformer of the parameters of a scene, which another network draws."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.tiny import encoders, sample_images, tokenizers
from tests.tiny.image_pipelines import PROMPT

from .entry import Built, Entry
from .unets_rarer import prior


def _parts(**changes: Any) -> dict[str, Any]:
    """Of less noise than the published scheduler begins with, whose rounding alone costs 5e-5."""
    from diffusers.pipelines.shap_e import ShapERenderer

    network = prior(
        num_embeddings=32,
        embedding_proj_dim=32,
        time_embed_dim=64,
        clip_embed_dim=64,
        additional_embeddings=0,
        time_embed_act_fn="gelu",
        norm_in_type="layer",
        encoder_hid_proj_type=None,
        added_emb_type=None,
        **changes,
    )
    scheduler = diffusers.HeunDiscreteScheduler(num_train_timesteps=100, prediction_type="sample")
    renderer = ShapERenderer(param_shapes=((8, 93), (8, 8), (8, 8), (8, 8)), d_latent=32, d_hidden=8)
    return {"prior": network, "scheduler": scheduler, "shap_e_renderer": renderer}


def _text() -> Built:
    encoder = {"text_encoder": encoders.clip_text_projected(), "tokenizer": tokenizers.clip()}
    return diffusers.ShapEPipeline(**_parts(), **encoder), {"prompt": PROMPT}


def _image() -> Built:
    """Every patch of the image is a token beside those of the scene."""
    encoder = {"image_encoder": encoders.clip_vision(), "image_processor": encoders.clip_image_processor()}
    pipe = diffusers.ShapEImg2ImgPipeline(**_parts(embedding_proj_norm_type="layer"), **encoder)
    return pipe, {"image": sample_images.scene(64, 64)}


ENTRIES = (
    Entry(name="ShapEPipeline", build=_text),
    Entry(name="ShapEImg2ImgPipeline", build=_image, prompts=""),
)
