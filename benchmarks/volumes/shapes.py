"""What the layers of one denoiser call see: sizes of the whole image's maps. The meta device will do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from patchpar.shard.unet.discover import discover
from patchpar.shard.unet.spatial_arguments import with_sample_size

SDXL: Mapping[str, Any] = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
"""The configuration of the UNet of SDXL base 1.0."""


class Attended(NamedTuple):
    """One self-attention: batch, tokens of the whole image, heads, numbers of a head."""

    batch: int
    tokens: int
    heads: int
    width: int


class Convolved(NamedTuple):
    """One convolution: numbers in a row of its input, and the rows that a band reads of those before and after it."""

    row: int
    before: int
    after: int


class Normed(NamedTuple):
    """One group norm."""

    batch: int
    groups: int


@dataclass(slots=True)
class Shapes:
    """All layers of one call that need other ranks, in the order in which they run. `prediction`: [..., H, W]."""

    attentions: list[Attended] = field(default_factory=list)
    convolutions: list[Convolved] = field(default_factory=list)
    norms: list[Normed] = field(default_factory=list)
    prediction: tuple[int, ...] = ()

    def see(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward pre-hook: note the input of a layer that mixes rows."""
        if isinstance(module, nn.GroupNorm):
            self.norms.append(Normed(args[0].shape[0], module.num_groups))
        elif isinstance(module, nn.Conv2d):
            if module.kernel_size[0] > 1:
                self.convolutions.append(_convolved(module, tuple(args[0].shape)))
        elif hasattr(module, "processor") and kwargs.get("encoder_hidden_states") is None:
            self.attentions.append(_attended(module, tuple(args[0].shape)))


def _convolved(conv: nn.Conv2d, shape: tuple[int, ...]) -> Convolved:
    before, stride = int(conv.padding[0]), conv.stride[0]
    return Convolved(math.prod(shape[:-2]) * shape[-1], before, max(0, conv.kernel_size[0] - stride - before))


def _attended(module: Any, shape: tuple[int, ...]) -> Attended:
    """Tokens come as [B, L, C], or as the map itself, [B, C, H, W]."""
    tokens = shape[1] if len(shape) == 3 else math.prod(shape[2:])
    return Attended(shape[0], tokens, module.heads, module.to_k.out_features // module.heads)


def shapes_of(denoiser: nn.Module, call: Mapping[str, Any]) -> Shapes:
    """Run the denoiser once, perhaps on the meta device, and note what its layers see."""
    shapes = Shapes()
    handles = [m.register_forward_pre_hook(shapes.see, with_kwargs=True) for m in denoiser.modules()]
    with torch.no_grad():
        shapes.prediction = tuple(denoiser(**call)[0].shape)
    for handle in handles:
        handle.remove()
    shapes.convolutions = shapes.convolutions[1:]  # the first reads the latent, which every rank holds
    return shapes


def sdxl() -> tuple[nn.Module, dict[str, Any]]:
    """The UNet of SDXL base 1.0 without weights, and a call for one guidance branch at 1024 x 1024."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(**SDXL)
        added = {"text_embeds": torch.zeros(1, 1280), "time_ids": torch.zeros(1, 6)}
        call = {
            "sample": torch.zeros(1, 4, 128, 128),
            "timestep": torch.zeros(1),
            "encoder_hidden_states": torch.zeros(1, 77, 2048),
            "added_cond_kwargs": added,
        }
    return unet, call


def sdxl_shapes(*pixels: int) -> dict[int, Shapes]:
    """What SDXL's layers see of one guidance branch, for square images of these sizes."""
    unet, call = sdxl()
    return {size: shapes_of(unet, with_sample_size((), call, (size // 8, size // 8))[1]) for size in pixels}


def embedded_shapes(folder: Path, *pixels: int) -> dict[int, Shapes]:
    """What layers of the UNet in this folder see of both guidance branches, for square images of these sizes."""
    from diffusers import AutoencoderKL, UNet2DConditionModel

    config = UNet2DConditionModel.load_config(folder, subfolder="unet")
    scale = 2 ** (len(AutoencoderKL.load_config(folder, subfolder="vae")["block_out_channels"]) - 1)
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
        call = {
            "timestep": torch.zeros(1),
            "encoder_hidden_states": torch.zeros(2, 1, config["cross_attention_dim"]),
            "added_cond_kwargs": {"text_embeds": torch.zeros(2, pooled), "time_ids": torch.zeros(2, 6)},
        }
        samples = {size: torch.zeros(2, config["in_channels"], size // scale, size // scale) for size in pixels}
    return {size: shapes_of(unet, {"sample": sample, **call}) for size, sample in samples.items()}


def rounds_of(denoiser: nn.Module, call: Mapping[str, Any]) -> tuple[int, int]:
    """(exchanges of keys and values, others) of one exact call, but for the final gather of the prediction."""
    sites = discover(denoiser, denoiser.forward, (), call)
    joined = {conv for norm in sites.norms for conv in norm.convs[:1]}
    alone = [site for site in sites.convs if site.path not in joined and not site.reads_sample]
    return len(sites.attentions), len(sites.norms) + len(alone)
