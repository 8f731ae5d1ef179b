"""The autoencoder of the avatar: causal, 4x per side, one latent frame per frame, anchored latents.

A frame's latents are what `training.latents` defines them to be, so that clips can be trained on without an encoder.
The decoder sees a few frames back, and keeps them between calls when it decodes a stream.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify, unpatchify
from torch import Tensor, nn

from training.face_data import ClipShape, sample_clip
from training.latents import to_latent
from training.vae import psnr

FACE_VAE_CONFIG = {
    "base_dim": 24,
    "z_dim": 4,
    "dim_mult": [1, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False],
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_temporal": 1,
    "scale_factor_spatial": 4,
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}


def new_face_vae(start: Path | None = None) -> AutoencoderKLWan:
    """A saved autoencoder, or a fresh one whose middle attention changes nothing yet."""
    if start is not None:
        return AutoencoderKLWan.from_pretrained(start, variant="fp16", torch_dtype=torch.float32)
    vae = AutoencoderKLWan(**FACE_VAE_CONFIG)
    for half in (vae.encoder, vae.decoder):
        for attention in half.mid_block.attentions:
            nn.init.zeros_(attention.proj.weight)
            nn.init.zeros_(attention.proj.bias)
    return vae


def encode_frames_alone(vae: AutoencoderKLWan) -> None:
    """Take earlier frames out of the encoder's convolutions: it has learnt the latents of single images only.

    Those are the same bit for bit, since nothing is before them; without this every later frame is encoded wrong.
    """
    for module in vae.encoder.modules():
        if isinstance(module, WanCausalConv3d):
            module.weight.data[:, :, :-1] = 0


def decode(vae: AutoencoderKLWan, latent_BCFHW: Tensor) -> Tensor:
    """Frames (B, 3, F, 4H, 4W), about -1 to 1: `vae.decode` without its clamp, which would stop gradients."""
    return unpatchify(vae.decoder(vae.post_quant_conv(latent_BCFHW)), FACE_VAE_CONFIG["patch_size"])


def encode(vae: AutoencoderKLWan, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance (B, 4, H/4, W/4) of single images."""
    patches = patchify(images_BCHW[:, :, None], FACE_VAE_CONFIG["patch_size"])
    mean, log_variance = vae.quant_conv(vae.encoder(patches))[:, :, 0].chunk(2, 1)
    return mean, log_variance


def clip_pixels(key: str, shape: ClipShape) -> Tensor:
    """The frames (3, F, H, W) of a clip, -1 to 1."""
    return torch.from_numpy(sample_clip(key, shape).frames).permute(3, 0, 1, 2).float() / 127.5 - 1


def clip_latents(pixels_BCFHW: Tensor) -> Tensor:
    """The latents (B, 4, F, H/4, W/4) that are defined for these frames."""
    frames = pixels_BCFHW.transpose(1, 2)
    return to_latent(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).transpose(1, 2)


@torch.no_grad()
def face_reconstruction(vae: AutoencoderKLWan, count: int, *, side: int) -> dict[str, float]:
    """How well held-out clips come back: from their latents and through the encoder, in dB, and the encoder's error."""
    decoded, cycled, error = [], [], []
    for seed in range(count):
        original = clip_pixels(f"held out {seed}", ClipShape(side=side, blocks=1, frames=24))[None]
        latent, first = clip_latents(original), original[:, :, :1]
        guess = vae.encode(first).latent_dist.mode()
        decoded.append(psnr(vae.decode(latent).sample, original))
        cycled.append(psnr(vae.decode(guess).sample, first))
        error.append(((guess - latent[:, :, :1]) ** 2).mean().item())
    mean = [sum(values) / count for values in (decoded, cycled, error)]
    return dict(zip(("decoder_db", "autoencoder_db", "latent_error"), mean, strict=True))
