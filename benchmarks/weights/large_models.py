"""Well-known models that are larger than many cards: their networks without weights, from their published sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patchpar.models.dry_run.call_memory import CallMemory
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import META, MetaMode
from patchpar.models.dry_run.plan_memory import network_bytes
from patchpar.pipeline.auto_weights import ModelForecast
from patchpar.shard.sdpa import AttentionReplaced

DTYPE = torch.bfloat16
Networks = Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The networks of a pipeline, by name, as much of one as the memory of plans depends on."""

    components: Networks


@dataclass(frozen=True, slots=True)
class LargeModel:
    """`networks` in bfloat16 on the meta device, and the arguments of one denoiser `call` of an image of `size`."""

    name: str
    size: str
    networks: Callable[[], Networks]
    call: Callable[[], dict[str, Any]]

    def forecast(self) -> ModelForecast:
        """Return the bytes of its weights, and of activations of one denoiser call."""
        networks = {name: network.to(DTYPE).eval() for name, network in self.networks().items()}
        memory = LiveBytes("denoise")
        mode = MetaMode(memory)
        with torch.no_grad(), AttentionReplaced(mode.attend), mode:
            networks["transformer"](**self.call())
        return ModelForecast(network_bytes(Pipeline(networks)), CallMemory(denoise=memory.peak))


def _empty(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _t5_xxl() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=4096, d_ff=10240, d_kv=64, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
    return T5EncoderModel(config)


def _umt5_xxl() -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=256384, d_model=4096, d_ff=10240, d_kv=64, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return UMT5EncoderModel(config)


def _clip_large() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    )


def _flux() -> Networks:
    from diffusers import AutoencoderKL, FluxTransformer2DModel

    with META:
        return {
            "transformer": FluxTransformer2DModel(guidance_embeds=True),
            "text_encoder": _clip_large(),
            "text_encoder_2": _t5_xxl(),
            "vae": AutoencoderKL(
                block_out_channels=(128, 256, 512, 512),
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                layers_per_block=2,
                latent_channels=16,
            ),
        }


def _flux_call() -> dict[str, Any]:
    return {
        "hidden_states": _empty(1, 4096, 64),
        "encoder_hidden_states": _empty(1, 512, 4096),
        "pooled_projections": _empty(1, 768),
        "timestep": _empty(1),
        "guidance": _empty(1),
        "img_ids": _empty(4096, 3),
        "txt_ids": _empty(512, 3),
    }


def _sd3_large() -> Networks:
    from diffusers import AutoencoderKL, SD3Transformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    with META:
        big_g = CLIPTextConfig(
            hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280
        )
        return {
            "transformer": SD3Transformer2DModel(
                sample_size=128,
                num_layers=38,
                attention_head_dim=64,
                num_attention_heads=38,
                caption_projection_dim=2432,
                out_channels=16,
                pos_embed_max_size=192,
                qk_norm="rms_norm",
            ),
            "text_encoder": _clip_large(),
            "text_encoder_2": CLIPTextModelWithProjection(big_g),
            "text_encoder_3": _t5_xxl(),
            "vae": AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=16),
        }


def _sd3_call() -> dict[str, Any]:
    return {
        "hidden_states": _empty(2, 16, 128, 128),
        "encoder_hidden_states": _empty(2, 333, 4096),
        "pooled_projections": _empty(2, 2048),
        "timestep": _empty(2),
    }


def _qwen() -> Networks:
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    with META:
        return {
            "transformer": QwenImageTransformer2DModel(),
            "text_encoder": _language_model(layers=28, width=3584, inner=18944, heads=28, groups=4, words=152064),
            "vae": AutoencoderKLQwenImage(),
        }


def _qwen_call() -> dict[str, Any]:
    return {
        "hidden_states": _empty(1, 4096, 64),
        "encoder_hidden_states": _empty(1, 512, 3584),
        "encoder_hidden_states_mask": torch.ones(1, 512, dtype=torch.bool),
        "timestep": _empty(1),
        "img_shapes": [[(1, 64, 64)]],
    }


def _flux2() -> Networks:
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel

    with META:
        return {
            "transformer": Flux2Transformer2DModel(),
            "text_encoder": _language_model(layers=40, width=5120, inner=32768, heads=32, groups=8, words=131072),
            "vae": AutoencoderKLFlux2(),
        }


def _flux2_call() -> dict[str, Any]:
    return {
        "hidden_states": _empty(1, 4096, 128),
        "encoder_hidden_states": _empty(1, 512, 15360),
        "timestep": _empty(1),
        "guidance": _empty(1),
        "img_ids": _empty(1, 4096, 4),
        "txt_ids": _empty(1, 512, 4),
    }


def _wan() -> Networks:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    with META:
        return {
            "transformer": WanTransformer3DModel(),
            "text_encoder": _umt5_xxl(),
            "vae": AutoencoderKLWan(),
        }


def _wan_call() -> dict[str, Any]:
    return {
        "hidden_states": _empty(1, 16, 21, 60, 104),
        "encoder_hidden_states": _empty(1, 512, 4096),
        "timestep": _empty(1),
    }


def _hunyuan() -> Networks:
    from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel

    with META:
        return {
            "transformer": HunyuanVideoTransformer3DModel(guidance_embeds=True),
            "text_encoder": _language_model(layers=32, width=4096, inner=14336, heads=32, groups=8, words=128320),
            "text_encoder_2": _clip_large(),
            "vae": AutoencoderKLHunyuanVideo(),
        }


def _hunyuan_call() -> dict[str, Any]:
    return {
        "hidden_states": _empty(1, 16, 33, 90, 160),
        "encoder_hidden_states": _empty(1, 256, 4096),
        "encoder_attention_mask": torch.ones(1, 256, dtype=torch.bool),
        "pooled_projections": _empty(1, 768),
        "timestep": _empty(1),
        "guidance": _empty(1),
    }


def _language_model(*, layers: int, width: int, inner: int, heads: int, groups: int, words: int) -> nn.Module:
    """A decoder of Llama's kind of that size: the bytes of blocks are those of Qwen 2.5 and Mistral as well."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=words,
        head_dim=128,
    )
    return LlamaModel(config)


MODELS = (
    LargeModel("Stable Diffusion 3.5 large", "1024 x 1024", _sd3_large, _sd3_call),
    LargeModel("FLUX.1", "1024 x 1024", _flux, _flux_call),
    LargeModel("Qwen-Image", "1024 x 1024", _qwen, _qwen_call),
    LargeModel("FLUX.2 dev", "1024 x 1024", _flux2, _flux2_call),
    LargeModel("Wan 2.1 14B", "81 frames of 832 x 480", _wan, _wan_call),
    LargeModel("HunyuanVideo", "129 frames of 1280 x 720", _hunyuan, _hunyuan_call),
)
