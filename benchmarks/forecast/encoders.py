"""Text encoders and the safety checker of published calls, at their own size on the meta device, with a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.forecast.models import Model

CLIP_TOKENS, T5_TOKENS = 77, 512
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
BIG_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10_240, "num_layers": 24, "num_heads": 64, "vocab_size": 32_128}
CHECKER = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
"""Of CLIP's ViT-L/14, which judges images of 224 x 224."""
EMBEDS = ("prompt_embeds", "pooled_prompt_embeds", "negative_prompt_embeds", "negative_pooled_prompt_embeds")
IN_PRODUCTS = "in products"
PROMPT = "x"
"""One word, whose tokens are filled up."""


def of_sd15() -> Mapping[str, Any]:
    """Return the text encoder of Stable Diffusion 1.5 and its safety checker."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessor

    vision = {**CHECKER, "patch_size": 14, "image_size": 224}
    checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, projection_dim=768))
    extractor = CLIPImageProcessor(size={"shortest_edge": 224}, crop_size=224)
    return {**_clip("", CLIP_L), "safety_checker": checker, "feature_extractor": extractor}


def of_sdxl() -> Mapping[str, Any]:
    """Return the two text encoders of SDXL."""
    return {**_clip("", CLIP_L), **_clip("_2", {**BIG_G, "projection_dim": 1280, "hidden_act": "gelu"}, projects=True)}


def of_flux() -> Mapping[str, Any]:
    """Return the two text encoders of FLUX.1."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(**T5_XXL, feed_forward_proj="gated-gelu")
    second = {"text_encoder_2": T5EncoderModel(config), "tokenizer_2": _tokenizer(T5_TOKENS)}
    return {**_clip("", CLIP_L), **second}


def of_flux_in_sglang() -> Mapping[str, Any]:
    """Return those of FLUX.1 as SGLang computes them: T5's attention in products and fp32, and its norms in one kernel.

    By sgl-project/sglang, python/sglang/multimodal_gen/runtime/models/encoders/t5.py.
    """
    from transformers import AttentionInterface, T5Config, T5EncoderModel
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    AttentionInterface.register(IN_PRODUCTS, _attention_in_products)
    config = T5Config(**T5_XXL, feed_forward_proj="gated-gelu", attn_implementation=IN_PRODUCTS)
    encoder = T5EncoderModel(config)
    for owner in list(encoder.modules()):
        for name, part in owner.named_children():
            if isinstance(part, T5LayerNorm):
                setattr(owner, name, torch.nn.LayerNorm(config.d_model, bias=False))  # moves as many bytes
    return {**of_flux(), "text_encoder_2": encoder}


def _attention_in_products(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **given: Any) -> Any:
    """Return the output [B, L, N, D] and the weights [B, N, L, L]; query, key and value are [B, N, L, D]."""
    scores = query @ key.transpose(2, 3)
    scores += given["position_bias"]
    weights = scores.float().softmax(-1).type_as(scores)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def with_encoders(model: Model, make: Callable[[], Mapping[str, Any]]) -> Model:
    """Return a model that encodes a prompt, and checks the image if it has a checker, in the dtype of its network."""

    def encoding() -> tuple[Any, dict[str, Any]]:
        pipe, call = model()
        dtype = call["prompt_embeds"].dtype
        with torch.device("meta"):
            parts = {
                name: each.to(dtype).eval() if isinstance(each, torch.nn.Module) else each
                for name, each in make().items()
            }
        pipe.register_modules(**parts)
        return pipe, {**{name: x for name, x in call.items() if name not in EMBEDS}, "prompt": PROMPT}

    return encoding


def _clip(ending: str, sizes: Mapping[str, Any], *, projects: bool = False) -> dict[str, Any]:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    kind = CLIPTextModelWithProjection if projects else CLIPTextModel
    config = CLIPTextConfig(**sizes, max_position_embeddings=CLIP_TOKENS)
    return {f"text_encoder{ending}": kind(config), f"tokenizer{ending}": _tokenizer(CLIP_TOKENS)}


def _tokenizer(tokens: int) -> Any:
    """Return a tokenizer of one word that fills up texts to so many tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({PROMPT: 0}, unk_token=PROMPT))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PROMPT, unk_token=PROMPT, model_max_length=tokens)
