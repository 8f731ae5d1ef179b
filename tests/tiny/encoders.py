"""Tiny text and image encoders, two layers deep and 32 wide unless told otherwise."""

from __future__ import annotations

import re
from typing import Any

_IMAGE = "<|image_pad|>"


def _clip_config(width: int) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=514,
        hidden_size=width,
        intermediate_size=64,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )


def clip_text(width: int = 32) -> Any:
    from transformers import CLIPTextModel

    return CLIPTextModel(_clip_config(width))


def clip_text_projected(width: int = 32) -> Any:
    from transformers import CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(_clip_config(width))


def _t5_config(width: int) -> dict[str, Any]:
    return {
        "vocab_size": 98,
        "d_model": width,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
    }


def t5(width: int = 32) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**_t5_config(width)))


def umt5(width: int = 32) -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**_t5_config(width)))


def llama(width: int = 32) -> Any:
    """Four layers: HunyuanVideo reads the last but two."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=260,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaModel(config)


def gemma(width: int = 32) -> Any:
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=260,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Gemma2Model(config)


def qwen3(width: int = 32) -> Any:
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=264,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        pad_token_id=256,
        bos_token_id=256,
        eos_token_id=256,
    )
    return Qwen3Model(config)


def mistral(width: int = 32) -> Any:
    """Three layers: FLUX.2 reads three of them. It can see images as well."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {
        "model_type": "mistral",
        "vocab_size": 264,
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=262)
    return Mistral3ForConditionalGeneration(config)


def qwen(width: int = 32) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 264,
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "pad_token_id": 256,
        "bos_token_id": 256,
        "eos_token_id": 256,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": width}
    marks = {
        "vision_start_token_id": 259,
        "vision_end_token_id": 260,
        "vision_token_id": 261,
        "image_token_id": 262,
        "video_token_id": 263,
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision | {"patch_size": 14}, **marks)
    return Qwen2_5_VLForConditionalGeneration(config)


def clip_vision(width: int = 32) -> Any:
    """StableVideoDiffusion resizes its image to 224 pixels: 16 patches of 56."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=224,
        patch_size=56,
        projection_dim=width,
    )
    return CLIPVisionModelWithProjection(config)


def multilingual_clip(width: int = 32) -> Any:
    """What Kandinsky 2.1 reads its prompts with: XLM-RoBERTa, and its mean over the tokens as wide as the prior's."""
    from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

    config = MCLIPConfig(
        vocab_size=260,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=80,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        transformerDimSize=width,
        imageDimSize=width,
    )
    return MultilingualCLIP(config)


def clip_image_processor() -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(crop_size={"height": 224, "width": 224}, size={"shortest_edge": 224})


def clip_image_reader() -> dict[str, Any]:
    """What reads an image in pipelines of Wan: the components `image_processor` and `image_encoder`."""
    return {"image_processor": clip_image_processor(), "image_encoder": clip_vision()}


class ImageReader:
    """Texts and images as a Qwen-VL model takes them, at most 16 patches of 14 pixels, four of which make a token.

    The processor of transformers cannot be made without torchvision. `most`: of longer texts it reads the last so many
    characters.
    """

    def __init__(self, tokenizer: Any, most: int = 100_000) -> None:
        from transformers import Qwen2VLImageProcessor

        self.tokenizer, self.most = tokenizer, most
        self.image_processor = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)

    def __call__(self, *, text: Any, images: Any = None, videos: None = None, **options: Any) -> Any:
        """Each mark of an image in the texts becomes as many as it has tokens; `options` go to the tokenizer."""
        texts = [each[-self.most :] for each in ([text] if isinstance(text, str) else text)]
        options = {"return_tensors": "pt"} | options
        if not images:
            return self.tokenizer(texts, **options)
        encoded = self.image_processor(images=images, return_tensors=options["return_tensors"])
        tokens = iter([int(grid.prod()) // 4 for grid in encoded["image_grid_thw"]])
        texts = [re.sub(re.escape(_IMAGE), lambda _: _IMAGE * next(tokens), each) for each in texts]
        inputs = self.tokenizer(texts, **options)
        of_images = inputs["input_ids"] == self.tokenizer.convert_tokens_to_ids(_IMAGE)
        inputs.update({**encoded, "mm_token_type_ids": of_images.int()})
        return inputs

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = False, **options: Any) -> Any:
        """A text, or a list of the tokens of one."""
        found = self.tokenizer.apply_chat_template(conversation, tokenize=tokenize, **options)
        return [found] if tokenize else found
