"""Video models for a frame queue, Wan and LTX-Video: a transformer with a noise level per frame, and a decoder.

Both transformers take one timestep per token: LTX's for image-to-video, diffusers' class for Wan since Wan 2.2, also
with weights of 2.1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    WanPipeline,
)
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.models.loading import load_pipeline, with_dtype
from patchpar.models.streaming.checkpoint import RequiredWeights, hollow_transformer, load_wan
from patchpar.models.streaming.decoder import WanDecoder
from patchpar.models.streaming.fifo.ltx_decoder import LtxDecoder, latents_late
from patchpar.models.streaming.model_facts import ModelFacts
from patchpar.models.streaming.video_folder import low_noise_below
from patchpar.shard.host_memory import to_device

FrameDecoder = WanDecoder | LtxDecoder
"""Decodes latent frames one by one. The first gives one image, each further one `per_latent`."""


class FrameNetwork(ABC):
    """A transformer called with frames of different noise levels: [B, C, F, H, W], texts [B, T, D].

    Its class methods load the parts of such models. `scale`: seconds, rows and columns of
    pixels per latent. `decoder`: wraps the VAE. On ranks that do not denoise a transformer has no weights. Raises
    UnsupportedModel.
    """

    decoder: Callable[[Any], FrameDecoder]

    def __init__(self, transformer: Any, scale: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> None:
        self._refuse(transformer.config)
        self._transformer, self._scale = transformer, scale

    @abstractmethod
    def _refuse(self, config: Any) -> None:
        """Raise UnsupportedModel for a transformer that cannot be called so."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, needs: RequiredWeights, options: Mapping[str, Any]) -> Any:
        """Load its pipeline, with None for parts that are not needed. Raises PlanError, UnsupportedModel."""

    @classmethod
    @abstractmethod
    def facts(cls, folder: Path) -> ModelFacts:
        """Read what a session must know from the configuration files of the folder."""

    @property
    def channels(self) -> int:
        return int(self._transformer.config.in_channels)

    @property
    def device(self) -> torch.device:
        return self._transformer.device

    @abstractmethod
    def predict(self, x_BCFHW: Tensor, sigmas: Sequence[float], text_BTD: Tensor) -> Tensor:
        """Return the velocity [B, C, F, H, W], noise minus clean frame, in float32. `sigmas`: F levels from 0 to 1."""


class WanFrames(FrameNetwork):
    """Wan. Raises UnsupportedModel if it cannot take a noise level per frame, or needs an image."""

    decoder = WanDecoder

    def _refuse(self, config: Any) -> None:
        if config.patch_size[0] != 1:
            raise UnsupportedModel(
                f"patches of {config.patch_size[0]} frames: a queue of frames needs patches of 1 frame"
            )
        if config.in_channels != config.out_channels or config.image_dim is not None:
            raise UnsupportedModel(
                f"this transformer takes {config.in_channels} channels and returns {config.out_channels}: it is an "
                "image-to-video model, and later frames have no image; load a text-to-video checkpoint"
            )

    @classmethod
    def load(cls, folder: Path, needs: RequiredWeights, options: Mapping[str, Any]) -> WanPipeline:
        if low_noise_below(folder) is not None:
            raise UnsupportedModel(
                "this pipeline has one transformer for high noise levels and another for low ones, but a window of "
                "the queue contains both; load Wan 2.1, or Wan 2.2 with 5 billion weights"
            )
        return load_wan(folder, needs, options)

    @classmethod
    def facts(cls, folder: Path) -> ModelFacts:
        vae = AutoencoderKLWan.load_config(folder, subfolder="vae")
        return ModelFacts(
            audio=None,
            per_latent=int(vae.get("scale_factor_temporal", 4)),
            spatial=int(vae.get("scale_factor_spatial", 8)),
        )

    def predict(self, x_BCFHW: Tensor, sigmas: Sequence[float], text_BTD: Tensor) -> Tensor:
        net = self._transformer
        _, rows, columns = net.config.patch_size
        timesteps = _timesteps(sigmas, x_BCFHW.shape[3] // rows * (x_BCFHW.shape[4] // columns), x_BCFHW.device)
        text = text_BTD.to(x_BCFHW.device, net.dtype)
        out: Tensor = net(x_BCFHW.to(net.dtype), timesteps, text, return_dict=False)[0]
        return out.float()


class LtxFrames(FrameNetwork):
    """LTX-Video. Raises UnsupportedModel without levels by frame."""

    decoder = LtxDecoder

    def _refuse(self, config: Any) -> None:
        if (config.patch_size, config.patch_size_t) != (1, 1) or config.in_channels != config.out_channels:
            raise UnsupportedModel(
                f"patches of {config.patch_size_t} x {config.patch_size} x {config.patch_size}, {config.in_channels} "
                f"channels in and {config.out_channels} out: a queue of frames needs patches of 1, and as many "
                "channels out as in"
            )

    @classmethod
    def load(cls, folder: Path, needs: RequiredWeights, options: Mapping[str, Any]) -> LTXPipeline:
        options = with_dtype({name: value for name, value in options.items() if value is not None})
        spared = needs.spared()
        if not needs.transformers:
            spared["transformer"] = hollow_transformer(LTXVideoTransformer3DModel, folder, options)
        return load_pipeline(str(folder), options | spared, kind=LTXPipeline)

    @classmethod
    def facts(cls, folder: Path) -> ModelFacts:
        with torch.device("meta"):
            vae = AutoencoderKLLTXVideo.from_config(AutoencoderKLLTXVideo.load_config(str(folder), subfolder="vae"))
        return ModelFacts(
            audio=None,
            per_latent=vae.temporal_compression_ratio,
            spatial=vae.spatial_compression_ratio,
            late=latents_late(vae),
            blends=False,
        )

    def predict(self, x_BCFHW: Tensor, sigmas: Sequence[float], text_BTD: Tensor) -> Tensor:
        net = self._transformer
        _, _, frames, rows, columns = x_BCFHW.shape
        found: Tensor = net(
            hidden_states=x_BCFHW.flatten(2).transpose(1, 2).to(net.dtype),
            encoder_hidden_states=text_BTD.to(x_BCFHW.device, net.dtype),
            timestep=_timesteps(sigmas, rows * columns, x_BCFHW.device),
            encoder_attention_mask=None,  # see `encoded_prompts`, which removes padding
            num_frames=frames,
            height=rows,
            width=columns,
            rope_interpolation_scale=self._scale,
            return_dict=False,
        )[0]
        return found.float().transpose(1, 2).reshape(x_BCFHW.shape)


def _timesteps(sigmas: Sequence[float], tokens: int, device: torch.device) -> Tensor:
    """The timestep of each token, [1, F * tokens], with so many tokens per frame."""
    of_frames = to_device(torch.tensor([1000 * sigma for sigma in sigmas]), device)
    return of_frames[:, None].expand(-1, tokens).reshape(1, -1)
