"""From finished latents to frames, block by block, with the very frames of the whole video decoded at once."""

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor


@dataclass(slots=True)
class DecoderState:
    """What a decoder remembers of a stream: the last features at each convolution. Empty before the first block."""

    features: list[Any] = field(default_factory=list)
    frames: int = 0


class WanDecoder:
    """`AutoencoderKLWan`, latent frame by latent frame. The first gives one image, each further one several.

    The autoencoder's own decode does the same for all frames of a video and then forgets; here the memory stays.
    """

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self._vae = vae
        self._convolutions = vae._cached_conv_counts["decoder"]
        mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
        self._mean, self._inverse_std = mean, 1.0 / std

    @property
    def per_latent(self) -> int:
        """Images of a latent frame, beyond the first."""
        return int(self._vae.config.scale_factor_temporal)

    def new_state(self) -> DecoderState:
        """What is remembered of a video: nothing yet."""
        return DecoderState()

    def finish(self, state: DecoderState) -> Tensor:
        """What is still missing when a video ends: nothing, since no frame waits for a later one."""
        return torch.empty(0, 3, 1, 1, device=self._vae.device)

    def decode(self, state: DecoderState, latents_BCFHW: Tensor) -> Tensor:
        """Images (frames, 3, height, width) between -1 and 1, of latents (1, C, F, H, W) as they were denoised."""
        vae, latents = self._vae, latents_BCFHW.to(self._vae.dtype)
        scaled = latents / self._inverse_std.to(latents) + self._mean.to(latents)  # as WanPipeline does it
        frames = vae.post_quant_conv(scaled)
        state.features = state.features or [None] * self._convolutions
        images = []
        for frame in frames.split(1, dim=2):
            first = {"first_chunk": True} if state.frames == 0 else {}
            images.append(vae.decoder(frame, feat_cache=state.features, feat_idx=[0], **first))
            state.frames += 1
        out = torch.cat(images, 2)
        if vae.config.patch_size is not None:
            out = unpatchify(out, patch_size=vae.config.patch_size)
        return out.clamp(-1, 1)[0].transpose(0, 1)

    def encode(self, image_1CHW: Tensor, *, chunks: int = 0) -> Tensor:
        """One latent frame (1, C, 1, H, W), as the transformer sees latents, of an image between -1 and 1.

        With `chunks` of 4 grey images behind it, the latent frames of all: what models generate from that were made to
        go on from an image.
        """
        image = image_1CHW[:, :, None].to(self._vae.device, self._vae.dtype)
        grey = image.new_zeros(*image.shape[:2], 4 * chunks, *image.shape[3:])
        latents = self._vae.encode(torch.cat([image, grey], 2)).latent_dist.mode()
        return (latents - self._mean.to(latents)) * self._inverse_std.to(latents)


def as_pixels(images_FCHW: Tensor) -> Tensor:
    """Images between -1 and 1 as (frames, height, width, 3) in uint8, on the CPU."""
    scaled = (images_FCHW.float() / 2 + 0.5) * 255
    return scaled.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


def from_pixels(image_HWC: Tensor) -> Tensor:
    """An image (height, width, 3) in uint8 as (1, 3, height, width) between -1 and 1."""
    return (image_HWC.float() / 127.5 - 1).permute(2, 0, 1)[None]
