"""Models at their own size on the meta device, without encoders and VAE, and a call of each. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.volumes.shapes import SDXL

Model = Callable[[], tuple[Any, dict[str, Any]]]
TEXTLESS = ("vae", "text_encoder", "tokenizer")
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
"""Of the VAEs of Stable Diffusion, SDXL and FLUX, which differ in their latent channels."""


def flux() -> tuple[Any, dict[str, Any]]:
    """FLUX.1 dev in bf16, 1024 x 1024, with 512 tokens of text."""
    return _flux(1024, 512, guided=True)


def flux_schnell(pixels: int) -> Model:
    """Return FLUX.1 schnell in bf16 for square images of this side, with 256 tokens of text, which is its most."""
    return lambda: _flux(pixels, 256, guided=False)


def _flux(pixels: int, tokens: int, *, guided: bool) -> tuple[Any, dict[str, Any]]:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    network = _empty(lambda: FluxTransformer2DModel(guidance_embeds=guided), torch.bfloat16)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=guided)
    missing = dict.fromkeys((*TEXTLESS, "text_encoder_2", "tokenizer_2"))
    texts = {"prompt_embeds": (1, tokens, 4096), "pooled_prompt_embeds": (1, 768)}
    pipe = FluxPipeline(scheduler=scheduler, transformer=network, **missing)
    return pipe, {**_call(pixels, pixels, texts, torch.bfloat16), "max_sequence_length": tokens}


def sdxl() -> tuple[Any, dict[str, Any]]:
    """The UNet of SDXL base 1.0 in fp16, 1024 x 1024, with guidance."""
    return _sdxl(1024, 1024)


def wide_sdxl() -> tuple[Any, dict[str, Any]]:
    """The same for 1280 x 1920."""
    return _sdxl(1280, 1920)


def _sdxl(height: int, width: int) -> tuple[Any, dict[str, Any]]:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    network = _empty(lambda: UNet2DConditionModel(**SDXL), torch.float16)
    missing = dict.fromkeys((*TEXTLESS, "text_encoder_2", "tokenizer_2"))
    texts = {"prompt_embeds": (1, 77, 2048), "pooled_prompt_embeds": (1, 1280)}
    texts |= {f"negative_{name}": shape for name, shape in texts.items()}
    pipe = StableDiffusionXLPipeline(unet=network, scheduler=EulerDiscreteScheduler(), **missing)
    return pipe, _call(height, width, texts, torch.float16)


def sd15() -> tuple[Any, dict[str, Any]]:
    """The UNet of Stable Diffusion 1.5 in fp16, 512 x 512, with guidance."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel

    network = _empty(
        lambda: UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8), torch.float16
    )
    missing = dict.fromkeys((*TEXTLESS, "safety_checker", "feature_extractor"))
    texts = {"prompt_embeds": (1, 77, 768), "negative_prompt_embeds": (1, 77, 768)}
    pipe = StableDiffusionPipeline(
        unet=network, scheduler=EulerDiscreteScheduler(), requires_safety_checker=False, **missing
    )
    return pipe, _call(512, 512, texts, torch.float16)


def qwen(pixels: int) -> Model:
    """Return Qwen-Image in bf16 for square images of this side, with guidance in two calls and short texts."""

    def model() -> tuple[Any, dict[str, Any]]:
        from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel

        network = _empty(QwenImageTransformer2DModel, torch.bfloat16)
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        pipe = QwenImagePipeline(scheduler=scheduler, transformer=network, **dict.fromkeys(TEXTLESS))
        texts = {name: (1, 64, 3584) for name in ("prompt_embeds", "negative_prompt_embeds")}
        call = _call(pixels, pixels, texts, torch.bfloat16)
        masks = {f"{name}_mask": torch.ones(1, 64, dtype=torch.int64) for name in texts}
        return pipe, {**call, **masks, "true_cfg_scale": 4.0}

    return model


def asking(model: Model) -> Model:
    """Return Qwen-Image in software that asks the device before each attention whether its mask leaves something out.

    vllm-omni does, in vllm_omni/diffusion/attention/backends/flash_attn.py.
    """

    def asked() -> tuple[Any, dict[str, Any]]:
        pipe, call = model()
        mask = torch.ones(1, 1, dtype=torch.bool, device="meta")
        for block in pipe.transformer.transformer_blocks:
            block.attn.norm_added_k.register_forward_hook(lambda *_: _masks_something(mask))  # before the attention
        return pipe, call

    return asked


def _masks_something(mask: torch.Tensor) -> None:
    """Ask the device for a value, which does not change anything without values. `mask`: [B, L]."""
    bool(torch.any(~mask))


def wan() -> tuple[Any, dict[str, Any]]:
    """Wan 2.1 14B in bf16, 81 frames of 832 x 480, with guidance in two calls."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    network = _empty(WanTransformer3DModel, torch.bfloat16)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = WanPipeline(scheduler=scheduler, transformer=network, **dict.fromkeys(TEXTLESS))
    texts = {name: (1, 512, 4096) for name in ("prompt_embeds", "negative_prompt_embeds")}
    return pipe, {**_call(480, 832, texts, torch.bfloat16), "num_frames": 81}


def hunyuan_video(height: int, width: int) -> Model:
    """Return HunyuanVideo in bf16, 129 frames of this size in pixels; its VAE in fp16 decodes in tiles."""

    def model() -> tuple[Any, dict[str, Any]]:
        from diffusers import (
            AutoencoderKLHunyuanVideo,
            FlowMatchEulerDiscreteScheduler,
            HunyuanVideoPipeline,
            HunyuanVideoTransformer3DModel,
        )

        network = _empty(HunyuanVideoTransformer3DModel, torch.bfloat16)
        vae = _empty(AutoencoderKLHunyuanVideo, torch.float16)
        vae.enable_tiling()
        missing = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        pipe = HunyuanVideoPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0), transformer=network, vae=vae, **missing
        )
        texts = {"prompt_embeds": (1, 256, 4096), "pooled_prompt_embeds": (1, 768)}
        mask = {"prompt_attention_mask": torch.ones(1, 256, dtype=torch.int64)}
        return pipe, {**_call(height, width, texts, torch.bfloat16), **mask, "num_frames": 129, "output_type": "pt"}

    return model


def unguided(model: Model) -> Model:
    """Return a model that is called without guidance, once in each step."""

    def without() -> tuple[Any, dict[str, Any]]:
        pipe, call = model()
        return pipe, {**call, "guidance_scale": 1.0}

    return without


def before_torch_2_9(model: Model) -> Model:
    """Return a model whose RMS norms are the kernels they consist of, as on GPUs before torch had one for them."""

    def older() -> tuple[Any, dict[str, Any]]:
        pipe, call = model()
        for norm in pipe.transformer.modules():
            if isinstance(norm, torch.nn.RMSNorm):
                norm.forward = _unseen(norm.forward)
        return pipe, call

    return older


def _unseen(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward of a norm of x [..., D], whose functions no mode sees."""

    def unseen(x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return forward(x)

    return unseen


def with_vae(model: Model, channels: int, *, upcast: bool = False) -> Model:
    """Return a model that decodes its latents of so many channels, in the dtype of its network.

    `upcast`: but for what enlarges the maps, which is in fp32, as diffusers 0.21 has it for SDXL in fp16.
    """

    def decoding() -> tuple[Any, dict[str, Any]]:
        from diffusers import AutoencoderKL

        pipe, call = model()
        options = {"latent_channels": channels, "force_upcast": False, "shift_factor": 0.1, **VAE}
        vae = _empty(lambda: AutoencoderKL(**options), call["prompt_embeds"].dtype)
        if upcast:
            for part in (vae.decoder.up_blocks, vae.decoder.conv_norm_out, vae.decoder.conv_out):
                part.float()
            vae.decoder.up_blocks[0].register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
        pipe.register_modules(vae=vae)
        return pipe, {**call, "output_type": "pt"}

    return decoding


def _empty(make: Callable[[], Any], dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return make().to(dtype).eval()


def _call(height: int, width: int, texts: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Any]:
    given = {name: torch.zeros(shape, dtype=dtype) for name, shape in texts.items()}
    return {**given, "height": height, "width": width, "output_type": "latent"}
