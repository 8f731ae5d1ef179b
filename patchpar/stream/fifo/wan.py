"""Wan as a FrameNetwork: diffusers' class takes one timestep per token since 2.2, also with weights of 2.1."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.stream.causal.checkpoint import RequiredWeights, load_wan
from patchpar.stream.causal.decoder import WanDecoder
from patchpar.stream.fifo.network import FrameNetwork, ModelFamily
from patchpar.stream.messages import ModelFacts
from patchpar.stream.model_index import low_noise_below


class WanFrames(FrameNetwork):
    """A FrameNetwork. Raises UnsupportedModel if it cannot take a noise level per frame, or needs an image."""

    def __init__(self, transformer: WanTransformer3DModel) -> None:
        config = transformer.config
        if config.patch_size[0] != 1:
            raise UnsupportedModel(
                f"patches of {config.patch_size[0]} frames: a queue of frames needs patches of 1 frame"
            )
        if config.in_channels != config.out_channels or config.image_dim is not None:
            raise UnsupportedModel(
                f"this transformer takes {config.in_channels} channels and returns {config.out_channels}: it is an "
                "image-to-video model, and later frames have no image; load a text-to-video checkpoint"
            )
        super().__init__(transformer)

    def predict(self, x_BCFHW: Tensor, sigmas: Sequence[float], text_BTD: Tensor) -> Tensor:
        net = self._transformer
        _, rows, columns = net.config.patch_size
        tokens = x_BCFHW.shape[3] // rows * (x_BCFHW.shape[4] // columns)
        timesteps = torch.tensor([1000 * sigma for sigma in sigmas]).repeat_interleave(tokens)[None]
        text = text_BTD.to(x_BCFHW.device, net.dtype)
        out: Tensor = net(x_BCFHW.to(net.dtype), timesteps.to(x_BCFHW.device), text, return_dict=False)[0]
        return out.float()


class WanFamily(ModelFamily):
    """Wan."""

    decoder = WanDecoder

    def load(self, folder: Path, needs: RequiredWeights, options: Mapping[str, Any]) -> WanPipeline:
        if low_noise_below(folder) is not None:
            raise UnsupportedModel(
                "this pipeline has one transformer for high noise levels and another for low ones, but a window of "
                "the queue contains both; load Wan 2.1, or Wan 2.2 with 5 billion weights"
            )
        return load_wan(folder, needs, options)

    def facts(self, folder: Path) -> ModelFacts:
        vae = AutoencoderKLWan.load_config(folder, subfolder="vae")
        return ModelFacts(
            audio=None,
            per_latent=int(vae.get("scale_factor_temporal", 4)),
            spatial=int(vae.get("scale_factor_spatial", 8)),
        )

    def network(self, transformer: WanTransformer3DModel, facts: ModelFacts, fps: float) -> WanFrames:
        return WanFrames(transformer)
