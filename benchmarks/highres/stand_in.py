"""Models whose evaluations are timed: the embedded one, and one of SDXL's form whose evaluation is large.

The evaluation of a small model is half bookkeeping on a processor, which bands do not share. SDXL's own takes minutes
on a core; a quarter as wide, with random weights, it has all its layers and its size of latent.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from patchpar.models.files import embedded_model

PART = 4  # of SDXL's width
DOWN = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
UP = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A UNet and a VAE; native images have `side` latents of `cell` pixels on each side."""

    unet: Any
    vae: Any
    side: int
    cell: int

    def call(self, branches: int) -> dict[str, Any]:
        """Arguments of an evaluation of so many branches at native size."""
        config = self.unet.config
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        return {
            "sample": torch.zeros(branches, config.in_channels, self.side, self.side),
            "timestep": 500,
            "encoder_hidden_states": torch.zeros(branches, 77, config.cross_attention_dim),
            "added_cond_kwargs": {"text_embeds": torch.zeros(branches, pooled), "time_ids": torch.zeros(branches, 6)},
        }

    def decode(self, scale: int) -> Callable[[], object]:
        """The decode of an image of so many times the native side."""
        latent: Tensor = torch.randn(1, 4, scale * self.side, scale * self.side)
        return lambda: self.vae.decode(latent)

    def unet_again(self) -> nn.Module:
        """The UNet once more, with the same weights in memory: for one more rank of this process."""
        return deepcopy(self.unet, {id(x): x for x in (*self.unet.parameters(), *self.unet.buffers())})


def embedded() -> StandIn:
    """The model that comes with the package."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        embedded_model(), variant="fp16", dtype=torch.float32, local_files_only=True
    )
    return StandIn(unet=pipe.unet, vae=pipe.vae, side=64, cell=4)


def of_sdxl() -> StandIn:
    """SDXL, a quarter as wide, of random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = diffusers.UNet2DConditionModel(
            sample_size=128,
            down_block_types=DOWN,
            up_block_types=UP,
            block_out_channels=(320 // PART, 640 // PART, 1280 // PART),
            norm_num_groups=16,
            attention_head_dim=(5, 10, 20),
            transformer_layers_per_block=(1, 2, 10),
            cross_attention_dim=2048 // PART,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
        vae = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128 // PART, 256 // PART, 512 // PART, 512 // PART),
            layers_per_block=2,
            latent_channels=4,
        )
    for network in (unet, vae):
        network.eval().requires_grad_(False)
    return StandIn(unet=unet, vae=vae, side=128, cell=8)
