"""Block-by-block decoding of latents [B, C, F, H, W], with the frames of the whole video decoded at once."""

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.shard.host_memory import to_device, to_host


@dataclass(slots=True)
class DecoderState:
    """State of a decoder: the last features at each convolution, empty before the first block; latent frames so far."""

    features: list[Any] = field(default_factory=list)
    frames: int = 0


class WanDecoder:
    """Decode with `AutoencoderKLWan`, latent frame by latent frame. The first gives one image, further ones several.

    The autoencoder's own `decode` does the same for a whole video and then clears its feature cache; here it is kept.
    """

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self.vae = vae
        self._convolutions = vae._cached_conv_counts["decoder"]
        mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
        self._mean, self._inverse_std = mean, 1.0 / std

    @property
    def per_latent(self) -> int:
        """Images per latent frame after the first."""
        return int(self.vae.config.scale_factor_temporal)

    def new_state(self) -> DecoderState:
        return DecoderState()

    def finish(self, state: DecoderState) -> Tensor:
        """Return the images left at the end of a video: none, [0, 3, 1, 1], since no frame depends on a later one."""
        return torch.empty(0, 3, 1, 1, device=self.vae.device)

    def decode(self, state: DecoderState, latents_BCFHW: Tensor) -> Tensor:
        """Decode denoised latents [1, C, F, H, W] to images [frames, 3, height, width] between -1 and 1."""
        vae, latents = self.vae, latents_BCFHW.to(self.vae.dtype)
        mean, inverse_std = self._scale_of(latents)
        scaled = latents / inverse_std + mean  # as WanPipeline does it
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

    def encode(self, image_1CHW: Tensor, *, still: int = 0, chunks: int = 0) -> Tensor:
        """Encode an image [1, 3, height, width] between -1 and 1 to normalized latents [1, C, 1 + more, H, W].

        `still`: further latent frames of the still image. `chunks`: groups of 4 grey images that follow, as
        image-to-video models take them, each one latent frame.
        """
        image = image_1CHW[:, :, None].to(self.vae.device, self.vae.dtype)
        repeated = image.repeat(1, 1, 1 + still * self.per_latent, 1, 1)
        grey = torch.zeros_like(image).repeat(1, 1, 4 * chunks, 1, 1)
        return self.normalized(self.vae.encode(torch.cat([repeated, grey], 2)).latent_dist.mode())

    def normalized(self, latents_BCFHW: Tensor) -> Tensor:
        """Return the autoencoder's latents [B, C, F, H, W] as transformers take them."""
        mean, inverse_std = self._scale_of(latents_BCFHW)
        return (latents_BCFHW - mean) * inverse_std

    def _scale_of(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and 1 / the standard deviation of latents of any size, in their dtype and on their device."""
        if self._mean.device != latents.device:  # once: a copy for each block would wait for the device
            self._mean, self._inverse_std = (to_device(x, latents.device) for x in (self._mean, self._inverse_std))
        return self._mean.to(latents), self._inverse_std.to(latents)


class WanEncoder:
    """Encode with `AutoencoderKLWan` block by block, to the latents of the whole video encoded at once."""

    def __init__(self, decoder: WanDecoder) -> None:
        self._decoder, self._vae = decoder, decoder.vae
        self._features: list[Any] = []  # the last ones at each convolution, none before the first frame

    def encode(self, images_FCHW: Tensor, count: int) -> Tensor:
        """Encode the next images [F, 3, height, width] between -1 and 1 to `count` latent frames [1, C, count, H, W].

        One image gives the first latent frame of a video, `per_latent` images each further one.
        """
        per_latent, vae = self._decoder.per_latent, self._vae
        images = images_FCHW.transpose(0, 1)[None].to(vae.device, vae.dtype)
        is_new, latents = not self._features, list[Tensor]()
        self._features = self._features or [None] * vae._cached_conv_counts["encoder"]
        if is_new:
            latents.append(self._encoded(images[:, :, :1]))
        if is_new and images.shape[2] == count * per_latent and per_latent > 1:
            latents.clear()  # in the middle of a video, the first image is for the features only
        elif is_new:
            images = images[:, :, 1:]
        latents += [self._encoded(chunk) for chunk in torch.split(images, per_latent, 2) if chunk.shape[2]]
        return self._decoder.normalized(torch.cat(latents, 2))

    def _encoded(self, images_BCFHW: Tensor) -> Tensor:
        vae = self._vae
        if vae.config.patch_size is not None:
            images_BCFHW = patchify(images_BCFHW, patch_size=vae.config.patch_size)
        moments: Tensor = vae.quant_conv(vae.encoder(images_BCFHW, feat_cache=self._features, feat_idx=[0]))
        return moments.chunk(2, dim=1)[0]


def as_pixels(images_FCHW: Tensor) -> Tensor:
    """Convert images [F, 3, H, W] between -1 and 1 to [F, H, W, 3] in uint8 on the CPU.

    Raises UnsupportedModel for values that are no numbers, which would be black for the rest of a stream.
    """
    images = images_FCHW.float()
    pixels = to_host(((images / 2 + 0.5) * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous())
    if not images.sum().isfinite():  # asked for when the device has computed all
        raise UnsupportedModel(
            "the images of this block are no numbers: the weights are damaged, or their dtype is too narrow for this "
            "model, as float16 may be: use torch_dtype='bfloat16' or 'float32'"
        )
    return pixels


def from_pixels(images_FHWC: Tensor) -> Tensor:
    """Convert images [F, H, W, 3] in uint8 to [F, 3, H, W] between -1 and 1."""
    return images_FHWC.float().permute(0, 3, 1, 2) / 127.5 - 1
