"""Pipelines of Cosmos 1, 2, 2.5 and 3: whole worlds of video from a text, from an image, and from what came before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from diffusers.models.controlnets import controlnet_cosmos
from torch import nn

from tests.tiny import autoencoders, encoders, sample_images, tokenizers
from tests.tiny.image_pipelines import PROMPT
from tests.tiny.transformer_pipelines import flow_matching

from .entry import Built, Entry, Guidance

_VIDEO: dict[str, Any] = {"prompt": PROMPT, "height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 32}
_IMAGE = {"image": sample_images.scene(64, 64)}
_QWEN_LAYERS = 2


class Unobjecting(nn.Module):
    """In place of the guardrail, which is a package of its own: finds nothing wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(1))

    @property
    def device(self) -> torch.device:
        return self.nothing.device

    @property
    def dtype(self) -> torch.dtype:
        return self.nothing.dtype

    def check_text_safety(self, text: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def _vae() -> Any:
    """Divides rows, columns and frames by 4."""
    return diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        patch_size=4,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        latents_mean=None,
        latents_std=None,
    )


def _transformer(in_channels: int, out_channels: int, **more: Any) -> Any:
    """The padding mask, for which torchvision is needed, is not among its channels."""
    options: dict[str, Any] = {"text_embed_dim": 32, "extra_pos_embed_type": "learnable", **more}
    return diffusers.CosmosTransformer3DModel(
        in_channels=in_channels,
        out_channels=out_channels,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        mlp_ratio=2.0,
        adaln_lora_dim=8,
        max_size=(4, 32, 32),
        concat_padding_mask=False,
        **options,
    )


def _world(
    name: str, call: dict[str, Any], channels: tuple[int, int], vae: Callable[[], Any], scheduler: Callable[[], Any]
) -> Callable[[], Built]:
    def build() -> Built:
        pipe = getattr(diffusers, name)(
            text_encoder=encoders.t5(),
            tokenizer=tokenizers.t5(),
            transformer=_transformer(*channels),
            vae=vae(),
            scheduler=scheduler(),
            safety_checker=Unobjecting(),
        )
        return pipe, {key: value for key, value in (_VIDEO | call).items() if value is not None}

    return build


def _predict() -> Built:
    """The text is all layers of a language model, one beside the other."""
    projected = {
        "use_crossattn_projection": True,
        "crossattn_proj_in_channels": 32 * _QWEN_LAYERS,
        "encoder_hidden_states_channels": 32,
    }
    pipe = diffusers.Cosmos2_5_PredictBasePipeline(
        text_encoder=encoders.qwen(),
        tokenizer=tokenizers.mistral(),
        transformer=_transformer(17, 16, **projected),
        vae=autoencoders.wan(),
        scheduler=_unipc(),
        safety_checker=Unobjecting(),
    )
    return pipe, dict(_VIDEO)


def _nearest(image: torch.Tensor, size: list[int], interpolation: Any = None) -> torch.Tensor:
    return nn.functional.interpolate(image, size)


def _with_resize() -> None:
    """Where torchvision is not installed: the one function of it that the ControlNet calls."""
    if not hasattr(controlnet_cosmos, "transforms"):
        modes = SimpleNamespace(NEAREST="nearest")
        functional = SimpleNamespace(resize=_nearest)
        controlnet_cosmos.transforms = SimpleNamespace(functional=functional, InterpolationMode=modes)


def _transfer() -> Built:
    """A ControlNet of the same blocks, whose residuals go into every block; frames in two chunks."""
    _with_resize()
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "mlp_ratio": 2.0, "text_embed_dim": 32}
    projected = {"use_crossattn_projection": True, "crossattn_proj_in_channels": 32 * _QWEN_LAYERS}
    projected |= {"encoder_hidden_states_channels": 32}
    controlnet = diffusers.CosmosControlNetModel(
        n_controlnet_blocks=2,
        in_channels=18,
        latent_channels=18,
        model_channels=24,
        adaln_lora_dim=8,
        max_size=(4, 32, 32),
        **sizes,
        **projected,
    )
    pipe = diffusers.Cosmos2_5_TransferPipeline(
        text_encoder=encoders.qwen(),
        tokenizer=tokenizers.mistral(),
        transformer=_transformer(17, 16, controlnet_block_every_n=1, **projected),
        vae=autoencoders.wan(),
        scheduler=_unipc(),
        controlnet=controlnet,
        safety_checker=Unobjecting(),
    )
    control = sample_images.video()
    return pipe, _VIDEO | {"controls": control, "num_frames_per_chunk": 5, "negative_prompt": "blurred"}


def _unipc() -> Any:
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000
    )


def _omni() -> Built:
    """Text, a given frame and the frames to come are one sequence of one transformer."""
    transformer = diffusers.Cosmos3OmniTransformer(
        head_dim=12,
        hidden_size=24,
        intermediate_size=48,
        latent_channel=16,
        num_attention_heads=4,
        num_hidden_layers=2,
        num_key_value_heads=2,
        patch_latent_dim=64,
        vocab_size=264,
        rope_axes_dim=(2, 2, 2),
    )
    pipe = diffusers.Cosmos3OmniPipeline(
        transformer=transformer,
        text_tokenizer=tokenizers.qwen(),
        vae=autoencoders.wan(),
        scheduler=_unipc(),
        enable_safety_checker=False,
    )
    templates = {"add_resolution_template": False, "add_duration_template": False, "use_system_prompt": False}
    call = {"prompt": PROMPT, "height": 64, "width": 64, "num_frames": 9}
    return pipe, call | _IMAGE | templates


def _karras() -> Any:
    return flow_matching(use_karras_sigmas=True)


def _edm() -> Any:
    return diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=8.0)


_ONE = {"num_frames": None}
_BUILD: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "CosmosTextToWorldPipeline": (_world("CosmosTextToWorldPipeline", {}, (4, 4), _vae, _edm), "a call each"),
    "CosmosVideoToWorldPipeline": (_world("CosmosVideoToWorldPipeline", _IMAGE, (5, 4), _vae, _edm), "a call each"),
    "Cosmos2TextToImagePipeline": (
        _world("Cosmos2TextToImagePipeline", _ONE, (16, 16), autoencoders.wan, _karras),
        "a call each",
    ),
    "Cosmos2VideoToWorldPipeline": (
        _world("Cosmos2VideoToWorldPipeline", _IMAGE, (17, 16), autoencoders.wan, _karras),
        "a call each",
    ),
    "Cosmos2_5_PredictBasePipeline": (_predict, "a call each"),
    "Cosmos2_5_TransferPipeline": (_transfer, "a call each"),
    "Cosmos3OmniPipeline": (_omni, "a call each"),
}
_ONE_AT_A_TIME = ("Cosmos3OmniPipeline",)

ENTRIES = tuple(
    Entry(name=name, build=build, guidance=guidance, prompts="" if name in _ONE_AT_A_TIME else "prompt")
    for name, (build, guidance) in _BUILD.items()
)
