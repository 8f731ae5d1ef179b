"""LTX-Video as a FrameNetwork: its transformer takes one timestep per token, for image-to-video."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.models.loading import load_pipeline, with_dtype
from patchpar.stream.causal.checkpoint import RequiredWeights, hollow_transformer
from patchpar.stream.fifo.ltx_decoder import LtxDecoder, latents_late
from patchpar.stream.fifo.network import FrameNetwork, ModelFamily, encode_prompt
from patchpar.stream.messages import ModelFacts


class LtxFrames(FrameNetwork):
    """`scale`: seconds, rows and columns of pixels per latent. Raises UnsupportedModel without levels by frame."""

    def __init__(self, transformer: LTXVideoTransformer3DModel, scale: tuple[float, float, float]) -> None:
        config = transformer.config
        if (config.patch_size, config.patch_size_t) != (1, 1) or config.in_channels != config.out_channels:
            raise UnsupportedModel(
                f"patches of {config.patch_size_t} x {config.patch_size} x {config.patch_size}, {config.in_channels} "
                f"channels in and {config.out_channels} out: a queue of frames needs patches of 1, and as many "
                "channels out as in"
            )
        super().__init__(transformer)
        self._scale = scale

    def predict(self, x_BCFHW: Tensor, sigmas: Sequence[float], text_BTD: Tensor) -> Tensor:
        net = self._transformer
        _, _, frames, rows, columns = x_BCFHW.shape
        timesteps = torch.tensor([1000 * sigma for sigma in sigmas]).repeat_interleave(rows * columns)[None]
        found: Tensor = net(
            hidden_states=x_BCFHW.flatten(2).transpose(1, 2).to(net.dtype),
            encoder_hidden_states=text_BTD.to(x_BCFHW.device, net.dtype),
            timestep=timesteps.to(x_BCFHW.device),
            encoder_attention_mask=None,  # `encode` removes padding
            num_frames=frames,
            height=rows,
            width=columns,
            rope_interpolation_scale=self._scale,
            return_dict=False,
        )[0]
        return found.float().transpose(1, 2).reshape(x_BCFHW.shape)


class LtxFamily(ModelFamily):
    """LTX-Video."""

    decoder = LtxDecoder

    def load(self, folder: Path, needs: RequiredWeights, options: Mapping[str, Any]) -> LTXPipeline:
        options = with_dtype({name: value for name, value in options.items() if value is not None})
        spared = needs.spared()
        if not needs.transformers:
            spared["transformer"] = hollow_transformer(LTXVideoTransformer3DModel, folder, options)
        return load_pipeline(str(folder), options | spared, kind=LTXPipeline)

    def facts(self, folder: Path) -> ModelFacts:
        vae = _shapes(folder)
        return ModelFacts(
            audio=None,
            per_latent=vae.temporal_compression_ratio,
            spatial=vae.spatial_compression_ratio,
            late=latents_late(vae),
            blends=False,
        )

    def network(self, transformer: LTXVideoTransformer3DModel, facts: ModelFacts, fps: float) -> LtxFrames:
        return LtxFrames(transformer, (facts.per_latent / fps, float(facts.spatial), float(facts.spatial)))

    def encode(
        self, pipe: LTXPipeline, text: str, negative: str | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return embeddings [1, T, D], see ModelFamily. Masked padding is cut off, so that T differs between texts."""
        text_BTD, mask, negative_BTD, negative_mask = encode_prompt(pipe, text, negative, **options)
        return _cut(text_BTD, mask), None if negative is None else _cut(negative_BTD, negative_mask)


def _cut(text_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    return text_BTD[:, mask_BT[0].bool()]


def _shapes(folder: Path) -> AutoencoderKLLTXVideo:
    """The autoencoder on the meta device, without weights."""
    with torch.device("meta"):
        return AutoencoderKLLTXVideo.from_config(AutoencoderKLLTXVideo.load_config(str(folder), subfolder="vae"))
