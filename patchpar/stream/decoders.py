"""From finished latents to frames, block by block, with the same result as for the whole film at once.

WanDecoder      a causal video autoencoder, which remembers the last frames at each convolution
FrameDecoder    an image autoencoder, one picture per latent frame
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor


@dataclass(slots=True)
class DecoderState:
    """What a decoder remembers of a stream: the last features at each convolution. Empty before the first block."""

    features: list[Any] = field(default_factory=list)
    frames: int = 0


class Decoder(Protocol):
    """Latents to pictures."""

    def decode(self, state: DecoderState, latents_BCFHW: Tensor) -> Tensor:
        """Pictures (frames, 3, height, width) between -1 and 1, of latents (1, C, F, H, W) as they were denoised."""


class WanDecoder:
    """`AutoencoderKLWan`, latent frame by latent frame. The first gives one picture, each further one four.

    The autoencoder's own decode does the same for all frames of a film and then forgets; here the memory stays.
    """

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self._vae = vae
        self._convolutions = vae._cached_conv_counts["decoder"]
        mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
        self._mean, self._inverse_std = mean, 1.0 / std

    def decode(self, state: DecoderState, latents_BCFHW: Tensor) -> Tensor:
        """See Decoder."""
        vae, latents = self._vae, latents_BCFHW.to(self._vae.dtype)
        scaled = latents / self._inverse_std.to(latents) + self._mean.to(latents)  # as WanPipeline does it
        frames = vae.post_quant_conv(scaled)
        state.features = state.features or [None] * self._convolutions
        pictures = []
        for frame in frames.split(1, dim=2):
            first = {"first_chunk": True} if state.frames == 0 else {}
            pictures.append(vae.decoder(frame, feat_cache=state.features, feat_idx=[0], **first))
            state.frames += 1
        out = torch.cat(pictures, 2)
        if vae.config.patch_size is not None:
            out = unpatchify(out, patch_size=vae.config.patch_size)
        return out.clamp(-1, 1)[0].transpose(0, 1)


class FrameDecoder:
    """`AutoencoderKL`: every latent frame is a picture, and nothing is remembered."""

    def __init__(self, vae: AutoencoderKL) -> None:
        self._vae = vae

    def decode(self, state: DecoderState, latents_BCFHW: Tensor) -> Tensor:
        """See Decoder."""
        config = self._vae.config
        shift = getattr(config, "shift_factor", None) or 0.0
        latents = latents_BCFHW[0].transpose(0, 1) / config.scaling_factor + shift
        state.frames += len(latents)
        return self._vae.decode(latents.to(self._vae.dtype), return_dict=False)[0].clamp(-1, 1)


def as_pixels(pictures_FCHW: Tensor) -> Tensor:
    """Pictures between -1 and 1 as (frames, height, width, 3) in uint8, on the CPU."""
    scaled = (pictures_FCHW.float() / 2 + 0.5) * 255
    return scaled.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
