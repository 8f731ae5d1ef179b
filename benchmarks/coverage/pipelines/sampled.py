"""Pipelines whose text is read by the denoiser itself, or into which a language model draws image tokens first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen

from tests.tiny import autoencoders, encoders, tokenizers
from tests.tiny.image_pipelines import PROMPT, SIZE
from tests.tiny.transformer_pipelines import flow_matching

from .entry import Built, Entry
from .single_stream import transformer

_CODES = 32
"""How many image tokens there are."""


def _to_tensor(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).astype(np.float32) / 255).permute(2, 0, 1)


_TRANSFORMS = SimpleNamespace(
    Compose=lambda steps: lambda x: [x := step(x) for step in steps][-1],
    Lambda=lambda function: function,
    ToTensor=lambda: _to_tensor,
    Normalize=lambda mean, std, inplace: lambda x: (x - mean[0]) / std[0],
)
"""What OmniGen takes of torchvision, which is not here."""


def _omnigen() -> Built:
    """Text and image are one sequence, which a language model's blocks read."""
    if not hasattr(pipeline_omnigen, "OmniGenMultiModalProcessor"):
        processor_omnigen.transforms = _TRANSFORMS
        pipeline_omnigen.OmniGenMultiModalProcessor = processor_omnigen.OmniGenMultiModalProcessor
    pipe = diffusers.OmniGenPipeline(
        transformer=transformer(
            "OmniGenTransformer2DModel", vocab_size=260, max_position_embeddings=1024, pos_embed_max_size=32
        ),
        scheduler=flow_matching(),
        vae=autoencoders.kl(),
        tokenizer=tokenizers.llama(),
    )
    return pipe, {"prompt": PROMPT, **SIZE}


class _Grids:
    """Texts as GLM-Image takes them, with 4 x 4 image tokens to be drawn and 2 x 2 before them.

    The processor of transformers asks for 16 x 16 before, however small the image is.
    """

    def apply_chat_template(self, conversations: list[Any], *, padding: bool, **options: Any) -> Any:
        texts = [conversation[0]["content"][-1]["text"] for conversation in conversations]
        inputs = tokenizers.qwen()(texts, padding=padding, padding_side="left", return_tensors="pt")
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 2, 2]] * len(texts))
        inputs["images_per_sample"] = torch.tensor([2] * len(texts))
        return inputs


def _drawer() -> Any:
    """The language model that draws image tokens."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    text = {
        "vocab_size": 264,
        "vision_vocab_size": _CODES,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 256,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "image_size": 64}
    quantizer = {"embed_dim": 16, "num_embeddings": _CODES, "latent_channels": 16}
    config = GlmImageConfig(
        text_config=text,
        vision_config=vision,
        vq_config=quantizer,
        image_token_id=262,
        image_start_token_id=259,
        image_end_token_id=260,
    )
    return GlmImageForConditionalGeneration(config)


def _glm() -> Built:
    pipe = diffusers.GlmImagePipeline(
        tokenizer=tokenizers.t5(),
        processor=_Grids(),
        text_encoder=encoders.t5(),
        vision_language_encoder=_drawer(),
        vae=autoencoders.kl(quant_conv=False, scaling_factor=0.36),
        transformer=transformer("GlmImageTransformer2DModel"),
        scheduler=flow_matching(use_dynamic_shifting=True),
    )
    return pipe, {"prompt": PROMPT, **SIZE}


ENTRIES = (
    Entry(name="OmniGenPipeline", build=_omnigen),
    Entry(name="GlmImagePipeline", build=_glm, guidance="a call each"),
)
