"""More language models that read the text of an image pipeline, two layers deep and 32 wide unless told otherwise."""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 256,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
_SPECIAL_TOKENS = {
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "image_token_id": 262,
    "video_token_id": 263,
}


def qwen3_vl(width: int = 32, layers: int = 2) -> Any:
    """It sees images too: `encoders.PictureReader` cuts them up."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = _TEXT | {"hidden_size": width, "num_hidden_layers": layers, "rope_scaling": rope}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": width,
        "patch_size": 14,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_SPECIAL_TOKENS))


def smollm3(width: int = 32) -> Any:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    sizes = {name: value for name, value in _TEXT.items() if name != "head_dim"}
    return SmolLM3ForCausalLM(SmolLM3Config(**sizes, hidden_size=width, num_hidden_layers=2))


def siglip(width: int = 32) -> Any:
    """An image of 56 pixels in 16 patches."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
    )
    return SiglipVisionModel(config)


def siglip_processor() -> Any:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": 56, "width": 56})


def siglip2(width: int = 32) -> Any:
    """An image in at most 16 patches of 14 pixels, each of which makes a token."""
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    config = Siglip2VisionConfig(
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_patches=16,
        patch_size=14,
    )
    return Siglip2VisionModel(config)


def siglip2_processor() -> Any:
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    return Siglip2ImageProcessorPil(patch_size=14, max_num_patches=16)
